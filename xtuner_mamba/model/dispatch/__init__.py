from xtuner_mamba.model.dispatch.table import (
    DISPATCH_TABLE,
    Dispatched,
    dispatch_packed,
    token_mixers,
)

__all__ = ["DISPATCH_TABLE", "Dispatched", "dispatch_packed", "token_mixers"]
