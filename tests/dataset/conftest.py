import pytest
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from xtuner_mamba.dataset.documents import TokenizedDocuments

disable_progress_bars()

VOCABULARY = ["<unk>", "<bos>", "<eos>", *(f"w{i}" for i in range(200))]


@pytest.fixture(scope="session")
def tokenizer():
    """One token a word, ``w7`` is token 10; BOS is 1 and EOS 2."""
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def make_rows():
    """Rows whose token ids tell the document and the place in it: ``1000 * document + place``."""

    def make(lengths, labels=None):
        input_ids = [[1000 * i + t for t in range(n)] for i, n in enumerate(lengths)]
        return Dataset.from_dict({"input_ids": input_ids, "labels": labels or input_ids})

    return make


@pytest.fixture(scope="session")
def make_documents(make_rows):
    def make(lengths, labels=None):
        return TokenizedDocuments(make_rows(lengths, labels))

    return make
