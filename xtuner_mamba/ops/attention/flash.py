"""Causal attention over packed documents by flash-attn, where somebody has installed it."""

from itertools import pairwise

from torch import Tensor

from xtuner_mamba.layout import offsets_on_host


def attention_flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, sliding_window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """See :func:`xtuner_mamba.ops.attention`; the rows are laid end to end."""
    from flash_attn import flash_attn_varlen_func

    max_seqlen = max(end - start for start, end in pairwise(offsets_on_host(cu_seqlens)))
    # versions before 2.6 have no softcap
    cap = {} if softcap is None else {"softcap": softcap}
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        softmax_scale=scale,
        causal=True,
        # tokens before itself; -1 is all of them
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        deterministic=True,
        **cap,
    )
