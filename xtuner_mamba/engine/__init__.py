"""What MMEngine's runner needs to know about packed documents: hooks and optimizer groups."""

from xtuner_mamba.engine.optim import MambaOptimWrapperConstructor

__all__ = ["MambaOptimWrapperConstructor"]
