"""knit: reinforcement learning for large language models on a disaggregated cluster."""

__version__ = "0.1.0"
