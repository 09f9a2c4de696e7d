"""Time attention over packed documents: here, and what PyTorch's attention takes for the row.

Documents are log-normal(6.2, 0.85) kept in [57, 2048]. "row" is PyTorch's causal attention over
the whole row, whose documents see each other; "mask" keeps them apart by a mask of the row;
"padded" has a row a document. bfloat16 on a GPU, float32 on a CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.ops import attention
from xtuner_mamba.testing import lognormal_lengths, relative_rms


def make_ways(lengths: list[int], device: str) -> dict[str, Callable[..., Tensor]]:
    """Return functions of q, k and v, ``(1, total, heads, headdim)``, by name."""
    layout = PackedLayout.from_lengths(lengths).to(device)
    owner = layout.seq_idx[0]

    def run_row(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

    def run_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = (owner[:, None] == owner).tril()
        return run_row(q, k, v, attn_mask=mask)

    def run_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [pad_sequence(t[0].split(lengths), batch_first=True) for t in (q, k, v)]
        y = run_row(*rows, is_causal=True)
        return torch.cat([row[:length] for row, length in zip(y, lengths)])[None]

    return {
        "packed": lambda q, k, v: attention(q, k, v, cu_seqlens=layout.cu_seqlens),
        "row": lambda q, k, v: run_row(q, k, v, is_causal=True),
        "mask": run_mask,
        "padded": run_padded,
    }


def measure(
    run: Callable[..., Tensor], qkv: list[Tensor], repeats: int
) -> tuple[float, float, Tensor]:
    """Run a way forward and backward; median milliseconds of both, and the output."""
    forwards, backwards = [], []
    for _ in range(2 + repeats):
        for tensor in qkv:
            tensor.grad = None
        times = [_now(qkv[0])]
        y = run(*qkv)
        times.append(_now(qkv[0]))
        y.backward(torch.ones_like(y))
        times.append(_now(qkv[0]))
        forwards.append(times[1] - times[0])
        backwards.append(times[2] - times[1])
    return statistics.median(forwards[2:]), statistics.median(backwards[2:]), y.detach()


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() * 1e3


def main(argv: list[str] | None = None) -> int:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the row")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a line of JSON a way")
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    lengths = lognormal_lengths(args.tokens)
    generator = torch.Generator().manual_seed(0)
    shape = 3, 1, args.tokens, args.heads, args.head_dim
    qkv = [
        t.to(device, dtype).requires_grad_()
        for t in torch.randn(shape, generator=generator).unbind()
    ]
    rows, outputs = [], {}
    for way, run in make_ways(lengths, device).items():
        forward, backward, outputs[way] = measure(run, qkv, args.repeats)
        rows.append(
            {"way": way, "forward_ms": round(forward, 2), "backward_ms": round(backward, 2)}
        )
    for way in ("packed", "padded"):
        error = relative_rms(outputs[way], outputs["mask"])
        if not error < 1e-2:
            raise RuntimeError(f"{way} must equal the row under a mask, got an error of {error}")
    if args.json:
        print("\n".join(map(json.dumps, rows)))
        return 0
    table = Table("way", "forward ms", "backward ms")
    for row in rows:
        table.add_row(row["way"], f"{row['forward_ms']:,.2f}", f"{row['backward_ms']:,.2f}")
    where = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    Console().print(f"{args.tokens:,} tokens, {len(lengths)} documents, {dtype}, {where}", table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
