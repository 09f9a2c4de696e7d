"""A reward model on packed pairs, as a thin subclass of XTuner's."""

import inspect
from types import SimpleNamespace

import torch
from mmengine import print_log
from torch import Tensor, nn
from xtuner.model.reward import RewardModel
from xtuner.registry import BUILDER

from xtuner_mamba.layout import current_layout, current_mean_targets
from xtuner_mamba.model.dispatch import dispatch_packed
from xtuner_mamba.model.lora import default_targets, dtypes_kept
from xtuner_mamba.model.preference_loss import pairs_of
from xtuner_mamba.model.reward_saving import (
    can_save_reward_model,
    has_sequence_classification,
    sequence_classification,
)
from xtuner_mamba.model.sft import (
    autocast_to,
    check_options,
    round_and_dispatch,
    take_dtype,
)


class PackedRewardModel(RewardModel):
    """``RewardModel`` whose packed step equals the step on its pairs one by one.

    An answer's reward is read at its last token, in float32; the mixers stop at document
    boundaries; the loss is the mean over all pairs of the optimizer step. With
    ``use_varlen_attn=False``, XTuner's own loss.

    Args:
        llm: A config dict or a module, with a language head or without.
        use_varlen_attn: Rows hold packed documents.
        autocast_dtype: As in ``PackedSupervisedFinetune``, as are ``fuse_norm`` and ``recompute``.
        fuse_norm: See there.
        recompute: See there.
        **kwargs: XTuner's other arguments.
    """

    def __init__(
        self,
        llm: dict | nn.Module,
        *,
        use_varlen_attn: bool = True,
        autocast_dtype: str | None = None,
        fuse_norm: bool | None = None,
        recompute: bool | None = None,
        **kwargs,
    ) -> None:
        check_options(autocast_dtype, fuse_norm=fuse_norm, recompute=recompute)
        # XTuner's constructor builds the model
        self._is_packed = use_varlen_attn
        self._dtype = take_dtype(llm) if use_varlen_attn and isinstance(llm, dict) else None
        self._dispatch_options = {"fuse_norm": fuse_norm, "recompute": recompute}
        super().__init__(llm, use_varlen_attn=use_varlen_attn, **kwargs)
        if use_varlen_attn:
            # again, since XTuner's constructor has dispatched once more, without our options
            dispatch_packed(self.llm, **self._dispatch_options)
        self.autocast_dtype = autocast_dtype

    def _build_from_cfg_or_module(self, cfg_or_mod: dict | nn.Module) -> SimpleNamespace:
        # XTuner looks for the layers below the head under the name that a Llama has for them
        llm = super()._build_from_cfg_or_module(cfg_or_mod).base_model
        if self._is_packed:
            round_and_dispatch(llm, self._dtype, **self._dispatch_options)
        return SimpleNamespace(model=llm)

    def _prepare_for_lora(self, *args, **kwargs) -> None:
        if self.lora.target_modules is None:
            self.lora.target_modules = default_targets(self.llm)
        with dtypes_kept(self.llm):
            super()._prepare_for_lora(*args, **kwargs)

    def forward(self, data: dict, data_samples=None, mode: str = "loss"):
        """Run XTuner's forward on what the model takes, under autocast if it was asked for."""
        base = self.llm.get_base_model() if self.use_lora else self.llm
        # of a Mamba below its head: no position_ids, and no others that it would pass over
        names = {"labels", *inspect.signature(type(base).forward).parameters}
        data = {name: value for name, value in data.items() if name in names}
        with autocast_to(self.autocast_dtype, data):
            return super().forward(data, data_samples, mode)

    def compute_loss(self, data: dict, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the batch's share of the optimizer step's mean loss over pairs."""
        if not self.use_varlen_attn:
            return super().compute_loss(data, labels)
        hidden_states = self.llm(**data)[0].flatten(0, -2)
        # without a layout a dispatched mixer has raised
        last = hidden_states[current_layout().cu_seqlens[1:].long() - 1]
        # the difference of two scores is left nothing by bfloat16
        with torch.autocast(last.device.type, enabled=False):
            scores = self.v_head(last.to(self.v_head.weight.dtype)).squeeze(-1)
        chosen, rejected = pairs_of(scores)
        mean_pairs = current_mean_targets()
        share = 1 / (len(chosen) if mean_pairs is None else mean_pairs)
        ranking = {"ranking": self.ranking_loss, "focal": self.focal_loss}[self.loss_type]
        loss = ranking(chosen, rejected, avg_factor=share)
        if self.penalty_type == "log_barrier":
            penalty = self.log_barrier_penalty(
                scores, lower_bound=-5, upper_bound=5, avg_factor=share
            )
            loss = loss + self.penalty_weight * penalty
        elif self.penalty_type == "L2":
            loss = loss + self.penalty_weight * self.l2_penalty(scores, avg_factor=share)
        return {
            "loss": loss,
            "acc": (chosen > rejected).float().mean(),
            "chosen_score_mean": chosen.detach().mean(),
            "rejected_score_mean": rejected.detach().mean(),
        }

    def state_dict(self, *args, **kwargs) -> dict:
        """Return what is trained; XTuner forgets the head of a model with LoRA."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, value in self.v_head.state_dict().items():
            state[f"{prefix}v_head.{name}"] = value
        return state

    def to_hf(
        self, cfg: dict, save_dir: str, fp32: bool = False, save_pretrained_kwargs=None, **kwargs
    ) -> None:
        """Save a model that ``AutoModelForSequenceClassification`` loads.

        A Mamba is saved with code beside the weights; models of code from the Hub, as XTuner does.

        Args:
            cfg: What the model was built from.
            save_dir: Where to.
            fp32: Whether to keep float32; float16 else, as XTuner does.
            save_pretrained_kwargs: Of ``save_pretrained``.
            **kwargs: XTuner passes others to other models.

        Raises:
            ValueError: There is no class that holds the model and its head.
        """
        llm = self.llm.merge_and_unload() if self.use_lora else self.llm
        if not can_save_reward_model(llm):
            raise ValueError(
                "llm must have a class for sequence classification to be saved with its head, got "
                f"{type(llm).__name__}; the weights are in the checkpoint, under llm and v_head"
            )
        save_pretrained_kwargs = save_pretrained_kwargs or {}
        if not has_sequence_classification(llm):
            self.llm = llm
            super().to_hf(cfg, save_dir, fp32, save_pretrained_kwargs, **kwargs)
            return
        config = llm.config
        config.num_labels, config.use_cache = 1, True
        model = sequence_classification(config)
        model.base_model.load_state_dict(llm.state_dict())
        model.score.load_state_dict(self.v_head.state_dict())
        if not fp32:
            model.half()
        print_log(f"Saving tokenizer and reward model to {save_dir}", "current")
        BUILDER.build(cfg.tokenizer).save_pretrained(save_dir)
        model.save_pretrained(save_dir, **save_pretrained_kwargs)
