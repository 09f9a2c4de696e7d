"""Sizes of batches: numbers, or the file that ``xtuner-mamba probe-batch`` writes."""

import re
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config

from xtuner_mamba.dataset import BucketBatchSampler
from xtuner_mamba.dataset.batch_sizes import choose_batch_sizes
from xtuner_mamba.dataset.buckets import check_bucket_arguments
from xtuner_mamba.integration.templates import templates

BOUNDARIES = np.array([4, 16])
BUCKET_TEMPLATES = [name for name in templates() if name.endswith("_bucket")]


@pytest.fixture
def measured(tmp_path):
    path = tmp_path / "batch_sizes.yaml"
    path.write_text("batch_sizes:\n  4: 3\n  8: 5\n  16: 2\ntokens: 64\n")
    return str(path)


def test_measured_sizes_make_the_batches(measured):
    lengths = [3] * 7 + [9] * 5
    for sizes in (measured, [3, 2]):
        sampler = BucketBatchSampler(
            lengths, BOUNDARIES, tokens_per_batch=1000, shuffle=False, batch_sizes=sizes
        )
        assert sampler.batch_sizes.tolist() == [3, 2]
        assert max(map(len, list(sampler)[:3])) == 3
        assert [len(batch) for batch in sampler][3:] == [1, 2, 2]
        assert len(sampler) == 6
    assert BucketBatchSampler(lengths, BOUNDARIES, 1000).batch_sizes.tolist() == [250, 62]


def test_sizes_that_cannot_be_met(measured, tmp_path):
    with pytest.raises(ValueError, match=r"at least 1 for each of the boundaries \[4, 16\], got"):
        choose_batch_sizes(BOUNDARIES, 16, [3])
    for sizes in ([3, 0], [3, 1.5], 3):
        with pytest.raises(ValueError, match=re.escape(f"got {sizes}")):
            choose_batch_sizes(BOUNDARIES, 16, sizes)
    other = tmp_path / "other.yaml"
    for text in ("tokens: 64", "[1", "a sentence"):
        other.write_text(text)
        with pytest.raises(ValueError, match=r"that has them, got '.*other.yaml' without; `xtun"):
            choose_batch_sizes(BOUNDARIES, 16, str(other))
    with pytest.raises(ValueError, match="a file on this machine, got 'nowhere"):
        check_bucket_arguments(dict(boundaries=[4, 16], batch_sizes="nowhere.yaml"))
    with pytest.raises(ValueError, match=rf"none for \[32\] in {measured}, which has \[4, 8, 16\]"):
        choose_batch_sizes(np.array([4, 32]), 16, measured)


@pytest.mark.parametrize("name", BUCKET_TEMPLATES)
def test_a_line_of_a_template_reads_the_file(tmp_path, name):
    text = Path(templates()[name]).read_text()
    assert text.count("batch_sizes = None") == 1
    copy = tmp_path / "copy.py"
    copy.write_text(text.replace("batch_sizes = None", 'batch_sizes = "batch_sizes.yaml"'))
    sampler = Config.fromfile(copy).train_dataloader.batch_sampler
    assert sampler.batch_sizes == "batch_sizes.yaml"
