"""Which parameters of a Mamba model are left out of weight decay."""

from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

NO_DECAY = ("A_log", "D")
"""Parameters that decay would pull towards another dynamics, whatever their shape."""


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class MambaOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Build the optimizer with weight decay on matrices, filters and embeddings only.

    ``A_log``, ``D``, ``dt_proj.bias``, norms and every other bias do not decay (Gu and Dao,
    "Mamba", 2023, appendix E.2). Usable in any config: ``optim_wrapper = dict(...,
    constructor=MambaOptimWrapperConstructor)``.

    Args:
        optim_wrapper_cfg: MMEngine's.
        paramwise_cfg: Must be empty: the groups are decided here.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        if paramwise_cfg:
            raise ValueError(
                f"paramwise_cfg must be empty with MambaOptimWrapperConstructor, got "
                f"{paramwise_cfg}; leave out one of the two"
            )
        # not empty, so that MMEngine asks add_params for the groups
        super().__init__(optim_wrapper_cfg, paramwise_cfg={"decay": "matrices only"})

    def add_params(self, params: list[dict], module: nn.Module, **kwargs) -> None:
        """Append the two parameter groups of ``module``."""
        params.extend(decay_groups(module, self.base_wd))


def decay_groups(model: nn.Module, weight_decay: float | None) -> list[dict]:
    """Split the trainable parameters into those that decay and those that do not.

    Returns:
        Optimizer groups, empty ones left out.
    """
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # ZeRO-3 leaves an empty tensor in place and keeps the real shape here
        shape = getattr(parameter, "ds_shape", parameter.shape)
        last = name.rpartition(".")[2]
        # Zamba has a bias for each head of a mixer, in one matrix
        exempt = len(shape) < 2 or last in NO_DECAY or last.endswith("bias")
        (no_decay if exempt else decay).append(parameter)
    groups = [dict(params=decay), dict(params=no_decay, weight_decay=0.0)]
    if weight_decay is not None:
        groups[0]["weight_decay"] = weight_decay
    return [group for group in groups if group["params"]]
