"""DeepSpeed engine: the only files of trainctl that import DeepSpeed."""
