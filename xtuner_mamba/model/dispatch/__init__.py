from xtuner_mamba.model.dispatch.table import (
    DISPATCH_TABLE,
    Dispatched,
    check_switches,
    dispatch_packed,
    is_dispatched,
    token_mixers,
)

__all__ = [
    "DISPATCH_TABLE",
    "Dispatched",
    "check_switches",
    "dispatch_packed",
    "is_dispatched",
    "token_mixers",
]
