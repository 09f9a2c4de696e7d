"""Supervised fine-tuning and pre-training on packed documents, as a thin subclass of XTuner's."""

from contextlib import nullcontext

import torch
from mmengine import print_log
from torch import Tensor, nn
from xtuner.model import SupervisedFinetune

from xtuner_mamba.layout import current_layout, current_mean_targets
from xtuner_mamba.model.dispatch import dispatch_packed
from xtuner_mamba.model.lora import default_targets
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
        if autocast_dtype not in (None, "bfloat16", "float16"):
            raise ValueError(
                f"autocast_dtype must be None, 'bfloat16' or 'float16', got {autocast_dtype!r}"
            )
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
            dtype = llm_cfg.get("torch_dtype")
            if not use_varlen_attn or dtype == "auto":
                dtype = None
            elif llm_cfg.get("quantization_config") is not None:
                # of what stays unquantised, which PEFT brings to float32 after it was rounded
                llm_cfg["torch_dtype"], dtype = torch.float32, None
            else:
                # loaded in full and rounded here: A_log and D must never have been rounded
                llm_cfg.pop("torch_dtype", None)
            llm = super().build_llm_from_cfg(llm_cfg, use_varlen_attn, max_position_embeddings)
        if use_varlen_attn:
            cast_all_but_dynamics(llm, _as_dtype(dtype))
            dispatched = dispatch_packed(llm, **self.dispatch_options)
            if dispatched.counts:
                print_log(f"Dispatch packed forwards: {dispatched.counts}", "current")
        return llm

    def _prepare_for_lora(self, *args, **kwargs) -> None:
        if self.lora.target_modules is None:
            self.lora.target_modules = default_targets(self.llm)
            print_log(f"LoRA on {self.lora.target_modules}", "current")
        # PEFT brings all that is not in 4 bits to float32, which frozen weights gain nothing from
        dtypes = [(parameter, parameter.dtype) for parameter in self.llm.parameters()]
        super()._prepare_for_lora(*args, **kwargs)
        for parameter, dtype in dtypes:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)

    def forward(self, data: dict, data_samples=None, mode: str = "loss"):
        """Run XTuner's forward, under ``autocast_dtype`` if there is one."""
        if self.autocast_dtype is None:
            context = nullcontext()
        else:
            device = data["input_ids"].device.type
            context = torch.autocast(device, getattr(torch, self.autocast_dtype))
        with context:
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


def _as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
