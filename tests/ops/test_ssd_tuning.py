"""Timings of mamba_ssm's kernels are kept, by Triton's tuner around a kernel that runs here."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton import Config
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner
from triton.runtime.jit import JITFunction

from xtuner_mamba.ops.ssd.tuning import keep_timings


class Kernel(JITFunction):
    """Adds 1 to ``out``, and notes with which block."""

    def __init__(self):
        super().__init__(_kernel)
        self.blocks = []

    def run(self, x, out, *, BLOCK, **options):
        self.blocks.append(BLOCK)
        out += 1


def _kernel(x, out, BLOCK):
    pass


def zero(names):
    return lambda nargs: [nargs[name].zero_() for name in names]


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    """An empty cache folder and a GPU of which Triton asks the name."""
    active = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(autotuner, "driver", SimpleNamespace(active=active))
    # not by the environment, over which goes what another test has set
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton.knobs.autotuning, "cache", False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def run_in_a_new_process(hooks, *, keep=True):
    """Run once; return the result, the blocks that ran in turn, and the tuner."""
    kernel = Kernel()

    def time_it(call, quantiles):
        call()
        # the second is the fastest
        return [abs(kernel.blocks[-1] - 32)] * 3

    configs = [Config({"BLOCK": b}, pre_hook=hook) for b, hook in zip((16, 32, 64), hooks)]
    tuner = autotuner.Autotuner(
        kernel, ["x", "out", "BLOCK"], configs, ["x"], None, None, do_bench=time_it
    )
    if keep:
        keep_timings(SimpleNamespace(kernel=tuner, other=len))
    out = torch.full((2,), 7.0)
    tuner.run(5, out, grid=(1,), warmup=False)
    return out.tolist(), kernel.blocks, tuner


@pytest.mark.parametrize("hooked", [False, True])
def test_a_machine_times_a_kernel_once(hooked):
    def run(**options):
        return run_in_a_new_process(
            [zero(["out"]) if hooked else None for _ in range(3)], **options
        )

    # as each time runs the kernel on it, but with a hook that sets it to 0 before
    added_to = 0 if hooked else 7
    out, blocks, tuner = run()
    assert blocks == [16, 32, 64, 32]
    assert out == 2 * [1 if hooked else 7 + 4]
    out, blocks, tuner = run()
    assert blocks == [32]
    assert out == 2 * [added_to + 1]
    assert tuner.best_config.kwargs == {"BLOCK": 32}
    _, blocks, _ = run(keep=False)
    assert blocks == [16, 32, 64, 32]


def test_hooks_that_differ_are_left_alone():
    hooks = [zero(["out"]), zero(["out"]), zero([])]
    for _ in range(2):
        out, blocks, tuner = run_in_a_new_process(hooks)
        assert blocks == [16, 32, 64, 32]
        assert out == [1, 1]
        assert [config.pre_hook for config in tuner.configs] == hooks
