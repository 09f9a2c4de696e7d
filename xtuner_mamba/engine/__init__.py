"""What MMEngine's runner needs to know about packed documents: hooks, loop and optimizer."""

from xtuner_mamba.engine.optim import MambaOptimWrapperConstructor
from xtuner_mamba.engine.token_accumulation import TokenAccumulationOptimWrapper, TokenStepLoop

__all__ = ["MambaOptimWrapperConstructor", "TokenAccumulationOptimWrapper", "TokenStepLoop"]
