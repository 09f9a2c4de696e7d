"""Forwards around transformers' ``MambaMixer`` that spare the GPU passes over its memory.

Replace ``MambaBlock.forward``, ``MambaRMSNorm.forward`` and ``MambaForCausalLM.forward`` of
transformers 4.48. Where the fused ops do not act, they hand over to transformers.
"""

import torch
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput

from xtuner_mamba.ops import NormWithResidual, linear_cross_entropy, rms_norm


def mamba_block_forward(
    self: nn.Module,
    hidden_states: Tensor,
    cache_params=None,
    cache_position: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    fuse_norm: bool | None = False,
) -> Tensor:
    """Add the mixed tokens to the residual stream, ``(batch, seqlen, hidden)`` in and out.

    ``fuse_norm`` is bound by ``dispatch_packed``.
    """
    if not _fuses(fuse_norm, hidden_states):
        return type(self).forward(self, hidden_states, cache_params, cache_position, attention_mask)
    normed, residual = self.norm(
        hidden_states,
        dtype=self.norm.weight.dtype,
        residual_dtype=torch.float32 if self.residual_in_fp32 else hidden_states.dtype,
    )
    return residual + self.mixer(
        normed,
        cache_params=cache_params,
        cache_position=cache_position,
        attention_mask=attention_mask,
    )


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
    cache_params=None,
    labels: Tensor | None = None,
    output_hidden_states: bool | None = None,
    return_dict: bool | None = None,
    use_cache: bool | None = None,
    cache_position: Tensor | None = None,
    *,
    targets: Tensor | None = None,
    **kwargs,
) -> tuple | MambaCausalLMOutput:
    """Run transformers' forward; with ``targets`` sum their cross entropy and keep no logits.

    ``targets`` is the token that each token predicts, int64, ``(batch * seqlen,)``, -100 where
    there is none. All other arguments are those of transformers.
    """
    if targets is None:
        return type(self).forward(
            self,
            input_ids,
            attention_mask,
            inputs_embeds,
            cache_params,
            labels,
            output_hidden_states,
            return_dict,
            use_cache,
            cache_position,
            **kwargs,
        )
    hidden_states = self.backbone(
        input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, return_dict=True
    ).last_hidden_state
    weight = self.lm_head.weight
    loss = linear_cross_entropy(hidden_states.flatten(0, -2).to(weight.dtype), weight, targets)
    return MambaCausalLMOutput(loss=loss)


def _fuses(wanted: bool | None, x: Tensor) -> bool:
    """Decide whether a fused op takes the place of transformers' own operations.

    Args:
        wanted: ``None`` stands for "on a GPU, in a dtype that its kernels take".
        x: What it would be applied to.
    """
    return x.is_cuda and x.dtype != torch.float64 if wanted is None else wanted
