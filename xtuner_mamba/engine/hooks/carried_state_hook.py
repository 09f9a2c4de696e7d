"""Keep the states that documents are carried on with, in training and in its checkpoints."""

import torch.distributed
from mmengine.dist import get_rank, get_world_size, is_distributed
from mmengine.hooks import CheckpointHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from xtuner.utils.device import get_device

from xtuner_mamba.carry import CarriedStates
from xtuner_mamba.dataset.carried_chunks import CarriedChunkBatchSampler
from xtuner_mamba.model.dispatch import token_mixers

# in the MessageHub, and so in checkpoints
_SAVED = "carried_states"

# of the training in this process
_states: CarriedStates | None = None


@HOOKS.register_module()
class CarriedStateHook(Hook):
    """Carry the states of conv and scan from batch to batch of ``CarriedChunkBatchSampler``.

    They depend on the weights of the step that computed them, so replaying the batches before a
    checkpoint would give others. A checkpoint therefore has those of all ranks, and ``--resume``
    needs as many ranks and the same rows. Validation is on whole documents.
    """

    def before_run(self, runner: Runner) -> None:
        loop = runner.val_loop
        sampler = getattr(getattr(loop, "dataloader", None), "batch_sampler", None)
        if isinstance(sampler, CarriedChunkBatchSampler):
            raise RuntimeError(
                "val_dataloader must have whole documents, got a CarriedChunkBatchSampler of "
                f"{len(sampler)} steps, which would move on the states of the training; validate "
                "on process_packed_dataset with packed_collate_fn"
            )

    def before_train(self, runner: Runner) -> None:
        global _states
        _states = CarriedStates()
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self._mixers = {name: len(found) for name, found in token_mixers(model.llm).items()}
        # NCCL would pass them through the GPUs
        self._group = torch.distributed.new_group(backend="gloo") if is_distributed() else None
        saved = runner.message_hub.get_info(_SAVED)
        if runner.iter and saved is not None:
            if len(saved) != get_world_size():
                raise RuntimeError(
                    f"a run must be resumed by as many ranks as saved its carried states, got "
                    f"{get_world_size()} for {len(saved)}; start as many, or train from the "
                    "checkpoint's weights with load_from and resume=False"
                )
            _states.load_state_dict(saved[get_rank()], get_device())
        runner.message_hub.update_info(_SAVED, None)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        if len(_states) != sum(self._mixers.values()):
            raise RuntimeError(
                f"every token mixer must carry its state, got {len(_states)} states of "
                f"{self._mixers}; attention carries none, and rows must come from "
                "CarriedChunkBatchSampler: use a template without carried chunks"
            )
        if _is_saved(runner):
            own = _states.state_dict()
            if self._group is None:
                gathered = [own]
            else:
                gathered = [None] * get_world_size() if get_rank() == 0 else None
                torch.distributed.gather_object(own, gathered, group=self._group)
            runner.message_hub.update_info(_SAVED, gathered)

    def after_train(self, runner: Runner) -> None:
        global _states
        _states = None


def carried_states() -> CarriedStates:
    """Return the states of the training in this process.

    Raises:
        RuntimeError: No hook keeps them.
    """
    if _states is None:
        raise RuntimeError(
            "custom_hooks must hold CarriedStateHook with rows that go on from batch to batch, got "
            "none that has begun; add dict(type=CarriedStateHook) from xtuner_mamba.engine.hooks"
        )
    return _states


def _is_saved(runner: Runner) -> bool:
    """Tell whether this iteration ends with a checkpoint."""
    return any(
        hook.every_n_train_iters(runner, hook.interval, hook.save_begin)
        or (hook.save_last and hook.is_last_train_iter(runner))
        for hook in runner.hooks
        if isinstance(hook, CheckpointHook) and not hook.by_epoch
    )
