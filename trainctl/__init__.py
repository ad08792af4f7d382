"""trainctl: a config-driven launcher and trainer for large models, built on DeepSpeed."""

__version__ = "0.1.0"
