"""run_blocks: every block once, on whichever threads there are."""

import logging
import re
import threading

import numba.core.caching
import pytest
import torch

from xtuner_mamba.ops import cpu_support, selective_scan
from xtuner_mamba.ops.cpu_support import LANES, as_rows, compile_kernel, run_blocks
from xtuner_mamba.testing import make_scan_inputs, outputs_and_grads


@pytest.fixture(params=["one thread", "PyTorch's threads", "own threads"])
def threads(request, monkeypatch):
    """By name; own threads are what remains where PyTorch's OpenMP is not GNU's."""
    # not set_num_threads: PyTorch's OpenMP keeps the threads it has
    num_threads = 1 if request.param == "one thread" else 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    if request.param == "own threads":
        monkeypatch.setattr(cpu_support, "_openmp", lambda: None)
    return request.param


def test_every_block_runs_once(threads):
    calls = []
    run_blocks(lambda *args: calls.append(args), 5 * LANES - 1, "x", "y")
    assert sorted(calls) == [(block, 5 * LANES - 1, "x", "y") for block in range(5)]


def test_blocks_run_at_the_same_time(threads):
    num_threads = 1 if threads == "one thread" else 3
    # broken, and an error, unless as many wait together
    together = threading.Barrier(num_threads, timeout=30)
    run_blocks(lambda *_: together.wait(), 3 * LANES)


def test_an_error_of_a_block_is_raised(threads):
    def fail(block, dim):
        raise ValueError(f"block {block} must fail")

    with pytest.raises(ValueError, match=re.escape("block ") + r"\d must fail"):
        run_blocks(fail, 3 * LANES)


def test_threads_do_not_change_a_bit(threads):
    inputs = make_scan_inputs([20, 1, 70], dim=3 * LANES + 1)
    results = outputs_and_grads(selective_scan, inputs, impl="cpu", dt_softplus=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        expected = outputs_and_grads(selective_scan, inputs, impl="cpu", dt_softplus=True)
    for name in expected:
        assert torch.equal(results[name], expected[name]), name


def test_pytorch_has_an_openmp_with_gnus_entry():
    # else the second case above tests the third
    assert cpu_support._openmp() is not None


def test_rows_are_views_where_they_can_be():
    wide = torch.arange(12.0).view(3, 4)
    memory, stride = as_rows(wide[:, 1:3], torch.float32)
    assert memory.tolist() == list(range(1, 11))
    assert stride == 4
    memory[0] = -1
    assert wide[0, 1] == -1
    memory, stride = as_rows(wide.mT, torch.float32)
    assert (memory.tolist(), stride) == (wide.mT.flatten().tolist(), 3)
    assert as_rows(wide, torch.float64)[0].dtype == "float64"
    assert as_rows(None, torch.float32)[0].size == 0


def test_no_folder_to_keep_a_kernel_in_is_said(monkeypatch, caplog):
    def double(value):
        return 2 * value

    with caplog.at_level(logging.WARNING):
        assert compile_kernel(double)(3) == 6
    assert not caplog.messages
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    with caplog.at_level(logging.WARNING):
        assert compile_kernel(double)(3) == 6
    assert "NUMBA_CACHE_DIR must name a folder" in caplog.text
    assert "compiles double again" in caplog.text
