"""What PyTorch's and flash-attn's kernels ask of their inputs and of the installation."""

import functools
import inspect
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)
# arguments of PyTorch's operators, by position
_FORWARD = [
    "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k",
    "is_causal", "scale", "window_size",
]  # fmt: skip
_BACKWARD = [
    "grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k",
    "is_causal", "rng_state", "scale", "window_size",
]  # fmt: skip


def why_not_varlen(q: Tensor, softcap: float | None) -> str | None:
    """Say what keeps PyTorch's varlen attention from these inputs, ``None`` if nothing does."""
    if softcap is not None:
        return f"softcap must be None for PyTorch's kernel, got {softcap}"
    reason = _why_not_halves(q) or _why_not_torch()
    if reason is None and not torch.backends.cuda.is_flash_attention_available():
        return f"torch must be built with flash attention, got {torch.__version__} without"
    return reason


def why_not_flash(q: Tensor, softcap: float | None) -> str | None:
    """Say what keeps flash-attn from these inputs, ``None`` if nothing does."""
    return _why_not_halves(q) or _why_not_flash_attn(softcap is not None)


def _why_not_halves(q: Tensor) -> str | None:
    if not q.is_cuda:
        return f"q must be on a CUDA device, got {q.device}"
    if q.dtype not in _HALVES:
        return f"q must be bfloat16 or float16, got {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"headdim must be a multiple of 8 up to 256, got {q.shape[-1]}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f"the GPU must have compute capability 8.0 or above, got {capability}"
    return None


@functools.cache
def _why_not_torch() -> str | None:
    wanted = "torch must be 2.11 or later, with the operators of torch.nn.attention.varlen"
    if not find_spec("torch.nn.attention.varlen"):
        return f"{wanted}, got {torch.__version__}"
    # registers them
    import_module("torch.nn.attention.varlen")
    ops = torch.ops.torch_attn
    forward, backward = (
        [argument.name for argument in op.default._schema.arguments]
        for op in (ops._varlen_attn, ops._varlen_attn_backward)
    )
    if forward[: len(_FORWARD)] != _FORWARD or backward != _BACKWARD:
        return f"{wanted} as of 2.14, got {torch.__version__} with {forward} and {backward}"
    return None


@functools.cache
def _why_not_flash_attn(capped: bool) -> str | None:
    needs = {"window_size", "deterministic"} | ({"softcap"} if capped else set())
    wanted = f"flash-attn must be installed, with {sorted(needs)}"
    if not find_spec("flash_attn"):
        return f"{wanted}, got none"
    from flash_attn import __version__, flash_attn_varlen_func

    missing = needs - set(inspect.signature(flash_attn_varlen_func).parameters)
    return f"{wanted}, got {__version__} without {sorted(missing)}" if missing else None
