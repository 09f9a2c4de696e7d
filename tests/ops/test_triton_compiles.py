"""The Triton kernels, compiled for a GPU where there is none: the interpreter checks no types.

Triton cannot compile in a process that it has been told to interpret in, so a process of its own
does. Every optional input is there, and in a dtype of its own where it may have one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

COMPILES = os.environ.get("TRITON_INTERPRET") == "0" and not torch.cuda.is_available()
ROWS = {"x", "dt", "z", "y", "dy", "dx", "ddt", "dz", "out", "dout"}
HALVES = ROWS | {
    "weight",
    "bias",
    "initial_states",
    "update",
    "dupdate",
    "logits",
    "states",
    "dadded",
}
INTEGERS = {"cu_seqlens", "cu_chunks", "seqs", "seq_idx", "targets"}
SCAN = {"SOFTPLUS": True, "DSTATE": 16, "BLOCK_N": 16, "BLOCK_D": 128}
DECAYS = {"CHUNK": 256, "HEADS": 8, "nheads": 64}
GATED_NORM = {"BEFORE_GATE": False, "BLOCK": 4096}
STATES = {"BLOCK": 1024, "size": 8192}
CONV = {"WIDTH": 4, "SILU": True, "BLOCK_D": 128, "GROUP": 8, "dim": 4096}
CONV |= {"stride_x": 8192, "stride_dy": 4096, "stride_dy_fork": 4096, "stride_dx": 8192}


def kernels():
    from xtuner_mamba.ops import residual
    from xtuner_mamba.ops.causal_conv1d import triton_bwd as conv_bwd
    from xtuner_mamba.ops.causal_conv1d import triton_fwd as conv_fwd
    from xtuner_mamba.ops.linear_cross_entropy import triton as cross_entropy
    from xtuner_mamba.ops.rms_norm import triton as norm
    from xtuner_mamba.ops.selective_scan import chunks, gpu_layout, triton_bwd, triton_fwd
    from xtuner_mamba.ops.ssd import triton_decays, triton_gated_norm, triton_rows, triton_states

    layout = {"A_IS_LOG": True, "BLOCK": 64, "dim": 4096}
    sums = layout | {"ROWS": 16, "width": 1024}
    no_BC = dict.fromkeys(("dBC_parts", "dB", "dC"))
    stages = {"VECTOR": 1, "NUM_STAGES": 4}
    return {
        "scan forward": (triton_fwd._scan_fwd_kernel, {"CHUNK": 64} | stages),
        "scan backward": (triton_bwd._scan_bwd_kernel, {"CHUNK": 64, "SUB": 4}),
        "chunks": (chunks._chunk_kernel, {"REVERSE": False} | stages),
        "chunks from the end": (chunks._chunk_kernel, {"REVERSE": True} | stages),
        "carry": (chunks._carry_kernel, {"REVERSE": False}),
        "carry from the end": (chunks._carry_kernel, {"REVERSE": True}),
        "weights": (gpu_layout._weights_kernel, layout),
        "sums": (gpu_layout._sum_kernel, sums),
        "sums, no B and C": (gpu_layout._sum_kernel, sums | no_BC),
        "conv forward": (conv_fwd._conv_fwd_kernel, {}),
        "conv backward": (conv_bwd._conv_bwd_kernel, {}),
        "conv sums": (conv_bwd._sum_filter_kernel, {"BLOCK": 32, "ROWS": 32}),
        "norm forward": (norm._norm_fwd_kernel, {"ROUND": True, "HAS_RESIDUAL": True}),
        "norm backward": (norm._norm_bwd_kernel, {"HAS_DRESIDUAL": True, "BLOCK_T": 32}),
        "sum": (residual._add_kernel, {"VECTOR": 16, "BLOCK": 4096}),
        "cross entropy": (
            cross_entropy._cross_entropy_kernel,
            {"vocab": 50280, "IGNORE": -100, "NEEDS_GRAD": True, "BLOCK_V": 4096},
        ),
        "chunk rows": (triton_rows._copy_rows_kernel, {"ROWS": 8, "BLOCK": 512}),
        "decays forward": (triton_decays._decays_fwd_kernel, DECAYS),
        "decays backward": (triton_decays._decays_bwd_kernel, DECAYS),
        "gated norm forward": (triton_gated_norm._gated_norm_fwd_kernel, GATED_NORM),
        "gated norm backward": (
            triton_gated_norm._gated_norm_bwd_kernel,
            GATED_NORM | {"BLOCK_T": 32},
        ),
        "states forward": (triton_states._pass_fwd_kernel, STATES),
        "states backward": (triton_states._pass_bwd_kernel, STATES),
        "conv forward, one tap": (conv_fwd._conv_fwd_kernel, {"WIDTH": 1}),
        "conv backward, one tap": (conv_bwd._conv_bwd_kernel, {"WIDTH": 1}),
    }


@pytest.mark.skipif(COMPILES or torch.cuda.is_available(), reason="the tests below run themselves")
def test_all_of_this_file_without_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", Path(__file__)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "25 passed, 1 skipped" in run.stdout, run.stdout


@pytest.mark.skipif(not COMPILES, reason="the test above runs it, or a GPU runs the kernels")
@pytest.mark.parametrize(
    "name",
    [
        "scan forward",
        "scan backward",
        "chunks",
        "chunks from the end",
        "carry",
        "carry from the end",
        "weights",
        "sums",
        "sums, no B and C",
        "conv forward",
        "conv backward",
        "conv sums",
        "norm forward",
        "norm backward",
        "sum",
        "cross entropy",
        "chunk rows",
        "decays forward",
        "decays backward",
        "gated norm forward",
        "gated norm backward",
        "states forward",
        "states backward",
        # windows of no tokens
        "conv forward, one tap",
        "conv backward, one tap",
    ],
)
def test_compiles(name):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = kernels()[name]
    constants = (CONV if "conv" in name else SCAN) | constants
    signature = {}
    for arg in kernel.arg_names:
        if arg in constants:
            signature[arg] = "constexpr"
        elif arg in INTEGERS:
            signature[arg] = "*i32"
        elif arg in ("order", "places", "slots", "sources", "doc_order"):
            signature[arg] = "*i64"
        elif arg in ("unknown_one", "eps"):
            signature[arg] = "fp32"
        elif arg.startswith("stride") or arg in (
            "dim",
            "total",
            "num_seqs",
            "num_groups",
            "num_parts",
            "num_rows",
            "num_slots",
            "num_vectors",
            "block_t",
            "num_chunks",
            "chunk_size",
            "size",
        ):
            signature[arg] = "i32"
        else:
            signature[arg] = "*fp16" if arg in HALVES else "*fp32"
    indices = {(kernel.arg_names.index(k),): v for k, v in constants.items() if k in signature}
    source = ASTSource(kernel, signature, indices)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
