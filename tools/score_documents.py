"""Score documents one at a time with plain transformers, and continue a prompt.

The other side of the demo's comparison: no packing, no XTuner, nothing of this project.
"""

import argparse
import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(argv: list[str] | None = None) -> int:
    """Write the logits of each document, end to end, and print the continued prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder in Hugging Face form")
    parser.add_argument("documents", help="JSON list of documents, each a list of token ids")
    parser.add_argument("logits", help="file to write, a tensor of shape (total, vocab)")
    parser.add_argument("--prompt", default="def ", help="text to continue (%(default)r)")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    args = parser.parse_args(argv)

    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with open(args.documents) as file:
        documents = json.load(file)
    with torch.no_grad():
        logits = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in documents]
    torch.save(torch.cat(logits), args.logits)

    prompt = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
    # a model that has seen little repeats itself
    output = model.generate(
        **prompt, max_new_tokens=args.max_new_tokens, do_sample=False, repetition_penalty=1.2
    )
    assert "xtuner_mamba" not in sys.modules
    print(f"transformers {transformers.__version__} continues {args.prompt!r}:")
    print(tokenizer.decode(output[0], skip_special_tokens=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
