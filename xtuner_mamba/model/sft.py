"""Supervised fine-tuning and pre-training on packed documents, as a thin subclass of XTuner's."""

from contextlib import AbstractContextManager, nullcontext

import torch
from mmengine import print_log
from torch import Tensor, nn
from xtuner.model import SupervisedFinetune

from xtuner_mamba.layout import current_layout, current_mean_targets
from xtuner_mamba.model.dispatch import check_switches, dispatch_packed
from xtuner_mamba.model.lora import default_targets, dtypes_kept
from xtuner_mamba.model.loss import packed_loss

KEEP_FLOAT32 = ("A_log", "D")
"""Parameters of a Mamba mixer that a low-precision model keeps in float32 (Mamba's own rule)."""


class PackedSupervisedFinetune(SupervisedFinetune):
    """``SupervisedFinetune`` whose packed step equals the step on its documents one by one.

    With ``use_varlen_attn`` the mixers stop at document boundaries, a document's first token is
    nobody's target, and the loss is the mean over all target tokens of the optimizer step
    (requirement E4). Without it, XTuner's own model.

    Args:
        llm: As in XTuner: a config dict or a module.
        use_varlen_attn: Rows hold packed documents.
        autocast_dtype: Run the forward under autocast of this dtype, ``"bfloat16"`` or
            ``"float16"``. Only for engines that do not (DeepSpeed in float32); XTuner's
            ``AmpOptimWrapper`` sets its own.
        fuse_norm: As in ``dispatch_packed``, as is ``recompute``.
        fuse_loss: Never hold the logits of a training step. ``None`` stands for "on a GPU".
        recompute: See ``fuse_norm``. Takes effect with ``use_activation_checkpointing=False``.
        **kwargs: XTuner's other arguments.
    """

    def __init__(
        self,
        llm: dict | nn.Module,
        *,
        use_varlen_attn: bool = True,
        autocast_dtype: str | None = None,
        fuse_norm: bool | None = None,
        fuse_loss: bool | None = None,
        recompute: bool | None = None,
        **kwargs,
    ) -> None:
        check_options(autocast_dtype, fuse_norm=fuse_norm, fuse_loss=fuse_loss, recompute=recompute)
        # XTuner's constructor builds and dispatches
        self.dispatch_options = {"fuse_norm": fuse_norm, "recompute": recompute}
        super().__init__(llm, use_varlen_attn=use_varlen_attn, **kwargs)
        self.autocast_dtype = autocast_dtype
        self.fuse_loss = fuse_loss

    def build_llm_from_cfg(
        self, llm_cfg: dict | nn.Module, use_varlen_attn: bool, max_position_embeddings: int | None
    ) -> nn.Module:
        """Build the language model, its ``A_log`` and ``D`` in float32, its mixers dispatched."""
        if isinstance(llm_cfg, nn.Module):
            # XTuner 0.2.0 takes a module in its signature, but loses it
            llm, dtype = llm_cfg, None
            llm.config.use_cache = False
        else:
            dtype = take_dtype(llm_cfg) if use_varlen_attn else None
            llm = super().build_llm_from_cfg(llm_cfg, use_varlen_attn, max_position_embeddings)
        if use_varlen_attn:
            round_and_dispatch(llm, dtype, **self.dispatch_options)
        return llm

    def _prepare_for_lora(self, *args, **kwargs) -> None:
        if self.lora.target_modules is None:
            self.lora.target_modules = default_targets(self.llm)
        with dtypes_kept(self.llm):
            super()._prepare_for_lora(*args, **kwargs)

    def forward(self, data: dict, data_samples=None, mode: str = "loss"):
        """Run XTuner's forward, under ``autocast_dtype`` if there is one."""
        with autocast_to(self.autocast_dtype, data):
            return super().forward(data, data_samples, mode)

    def compute_loss(self, data: dict, data_samples=None) -> dict[str, Tensor]:
        """Return the batch's share of the optimizer step's mean token loss."""
        layout = current_layout()
        if not self.use_varlen_attn or layout is None:
            # without a layout a dispatched mixer raises
            return super().compute_loss(data, data_samples)
        labels = data.pop("labels")
        loss = packed_loss(
            self.llm, data, labels, layout, current_mean_targets(), fuse=self.fuse_loss
        )
        return {"loss": loss}


def check_options(autocast_dtype: str | None = None, **switches: bool | None) -> None:
    """Check what our models take beside XTuner's arguments, before anything is built.

    Args:
        autocast_dtype: Of a model.
        **switches: ``fuse_norm``, ``fuse_loss`` and ``recompute``.

    Raises:
        ValueError: There is no autocast to this dtype, or a switch is no bool.
    """
    if autocast_dtype not in (None, "bfloat16", "float16"):
        raise ValueError(
            f"autocast_dtype must be None, 'bfloat16' or 'float16', got {autocast_dtype!r}; leave "
            "it out to compute as the optimizer wrapper says"
        )
    check_switches(**switches)


def autocast_to(dtype: str | None, data: dict) -> AbstractContextManager:
    """Return the context of a forward on ``data``, one that does nothing for ``None``."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(data["input_ids"].device.type, getattr(torch, dtype))


def take_dtype(llm_cfg: dict) -> torch.dtype | None:
    """Have the weights loaded in full: ``A_log`` and ``D`` must never have been rounded.

    Args:
        llm_cfg: What builds the model; changed in place.

    Returns:
        What to round the others to, if anything.
    """
    dtype = llm_cfg.get("torch_dtype")
    if dtype == "auto":
        return None
    if llm_cfg.get("quantization_config") is not None:
        # of what stays unquantised, which PEFT brings to float32 anyway
        llm_cfg["torch_dtype"] = torch.float32
        return None
    llm_cfg.pop("torch_dtype", None)
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def round_and_dispatch(llm: nn.Module, dtype: torch.dtype | None, **options) -> None:
    """Cast all but the dynamics, and let the mixers stop at document boundaries.

    Args:
        llm: The model, changed in place.
        dtype: See :func:`cast_all_but_dynamics`.
        **options: Of ``dispatch_packed``.
    """
    cast_all_but_dynamics(llm, dtype)
    dispatched = dispatch_packed(llm, **options)
    if dispatched.counts:
        print_log(f"Dispatch packed forwards: {dispatched.counts}", "current")


def cast_all_but_dynamics(llm: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast a model in place, but keep the parameters in :data:`KEEP_FLOAT32` from rounding.

    Args:
        llm: The model.
        dtype: Of everything else; ``None`` leaves it as it is.
    """
    for name, tensor in [*llm.named_parameters(), *llm.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        wanted = tensor.dtype if dtype is None else dtype
        if name.rpartition(".")[2] in KEEP_FLOAT32:
            wanted = torch.promote_types(wanted, torch.float32)
        tensor.data = tensor.data.to(wanted)
