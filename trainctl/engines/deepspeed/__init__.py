"""DeepSpeed: the only files of trainctl that import it."""
