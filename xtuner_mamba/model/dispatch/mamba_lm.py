"""Forwards around transformers' Mamba mixers that spare the GPU passes over its memory.

Replace those of the blocks, norms and language models of Mamba, Falcon-Mamba and Mamba-2, and of
the norms and language models of Jamba, Zamba and Bamba, of transformers 4.48. Where the fused ops
do not act, they hand over to transformers. Any other causal language model gets a forward whose
loss keeps documents apart.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput, ModelOutput

from xtuner_mamba.layout import IGNORE_INDEX, current_layout
from xtuner_mamba.model.dispatch.mamba import has_hooks
from xtuner_mamba.ops import (
    NormWithResidual,
    add_before_norm,
    linear_cross_entropy,
    rms_norm,
)


def mamba_block_forward(
    self: nn.Module,
    hidden_states: Tensor,
    cache_params=None,
    cache_position: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    fuse_norm: bool | None = False,
    place: tuple[nn.Module, int] | None = None,
) -> Tensor:
    """Add the mixed tokens to the residual stream, ``(batch, seqlen, hidden)`` in and out.

    The sum is what the next norm reads, so on a GPU it is normed at once where nothing stands
    between. ``fuse_norm`` and ``place``, the model and the block's index there, are bound by
    ``dispatch_packed``.
    """
    if not _fuses(fuse_norm, hidden_states):
        return type(self).forward(self, hidden_states, cache_params, cache_position, attention_mask)
    normed, residual = self.norm(
        hidden_states,
        dtype=self.norm.weight.dtype,
        residual_dtype=torch.float32 if self.residual_in_fp32 else hidden_states.dtype,
    )
    mixed = self.mixer(
        normed,
        cache_params=cache_params,
        cache_position=cache_position,
        attention_mask=attention_mask,
    )
    if not _runs_kernels(residual) or (
        torch.promote_types(residual.dtype, mixed.dtype) != residual.dtype
    ):
        return residual + mixed
    following = None if place is None else _following_norm(self, *place)
    if following is not None:
        norm, dtype = following
        return add_before_norm(residual, mixed, norm.weight, eps=norm.variance_epsilon, dtype=dtype)
    if residual.dtype == mixed.dtype:
        return residual + mixed
    from xtuner_mamba.ops.residual import add_to_residual

    return add_to_residual(residual, mixed)


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda


def _following_norm(
    block: nn.Module, model: nn.Module, index: int
) -> tuple[nn.Module, torch.dtype | None] | None:
    """Return the norm that reads a block's output, and what it rounds to; none if unsure.

    Args:
        block: The block.
        model: Its model when it was dispatched.
        index: Its place there then.
    """
    # nothing is gained without a backward, and a checkpointed block keeps its input alone
    if not torch.is_grad_enabled() or (
        getattr(model, "gradient_checkpointing", False) and model.training
    ):
        return None
    layers = model.layers
    if index >= len(layers) or layers[index] is not block:
        return None
    is_last = index + 1 == len(layers)
    following = model.norm_f if is_last else layers[index + 1]
    norm = following if is_last else getattr(following, "norm", None)
    for module in (following, norm):
        # somebody has wrapped it, or its weights are elsewhere until it is called (ZeRO-3, FSDP)
        forward = getattr(getattr(module, "forward", None), "func", None)
        if forward not in (mamba_block_forward, mamba_norm_forward) or has_hooks(module):
            return None
    return norm, None if is_last else norm.weight.dtype


def mamba_norm_forward(
    self: nn.Module,
    hidden_states: Tensor,
    *,
    dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    fuse_norm: bool | None = False,
) -> Tensor | NormWithResidual:
    """Norm every token, ``(batch, seqlen, hidden)``; for a block also return its residual.

    ``fuse_norm`` is bound by ``dispatch_packed``.
    """
    if not _fuses(fuse_norm, hidden_states):
        return type(self).forward(self, hidden_states)
    result = rms_norm(
        hidden_states,
        self.weight,
        eps=self.variance_epsilon,
        dtype=dtype,
        residual_dtype=residual_dtype,
    )
    return result.y if residual_dtype is None else result


def mamba_causal_lm_forward(
    self: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    targets: Tensor | None = None,
    **kwargs,
) -> tuple | ModelOutput:
    """Run transformers' forward; with ``targets`` sum their cross entropy and keep no logits.

    ``targets`` is the token that each token predicts, int64, ``(batch * seqlen,)``, -100 where
    there is none. ``labels`` are as in :func:`causal_lm_forward`. All other arguments are those
    of transformers.

    Raises:
        RuntimeError: As there.
    """
    inputs = dict(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds)
    # without attention there are no positions
    if self.base_model_prefix == "model":
        inputs["position_ids"] = position_ids
    if targets is None:
        return type(self).forward(self, labels=_within_documents(labels), **inputs, **kwargs)
    decoder = getattr(self, self.base_model_prefix)
    hidden_states = decoder(**inputs, return_dict=True).last_hidden_state
    weight = self.lm_head.weight
    loss = linear_cross_entropy(hidden_states.flatten(0, -2).to(weight.dtype), weight, targets)
    return CausalLMOutput(loss=loss)


def causal_lm_forward(self: nn.Module, *args: object, **kwargs: object) -> tuple | ModelOutput:
    """Run the class's own forward; its loss of ``labels`` stays within the published documents.

    ``labels`` is int64, ``(batch, seqlen)``, not shifted, -100 where there is no target.

    Raises:
        RuntimeError: There are labels, and a layout of another batch or of carried documents.
    """
    call = inspect.signature(type(self).forward).bind(self, *args, **kwargs)
    if call.arguments.get("labels") is not None:
        call.arguments["labels"] = _within_documents(call.arguments["labels"])
    return type(self).forward(*call.args, **call.kwargs)


def _within_documents(labels: Tensor | None) -> Tensor | None:
    """Make no document's first token a target, which transformers' shift would make it."""
    layout = current_layout()
    if labels is None or layout is None:
        return labels
    layout.check_covers(*labels.shape)
    if layout.carried is not None:
        raise RuntimeError(
            f"labels must not be given with carried documents, got {tuple(labels.shape)}; the "
            "last token of a chunk has its target in the next one: take packed_loss"
        )
    starts = layout.cu_seqlens[:-1].long()
    return labels.flatten().index_fill(0, starts, IGNORE_INDEX).view(labels.shape)


def _fuses(wanted: bool | None, x: Tensor) -> bool:
    """Decide whether a fused op takes the place of transformers' own operations.

    Args:
        wanted: ``None`` stands for "on a GPU, in a dtype that its kernels take".
        x: What it would be applied to.
    """
    return x.is_cuda and x.dtype != torch.float64 if wanted is None else wanted
