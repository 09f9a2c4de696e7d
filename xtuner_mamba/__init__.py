"""Train Mamba language models on packed variable-length documents with XTuner."""

__version__ = "0.1.0"
