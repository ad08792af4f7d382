"""Tensor, pipeline and expert parallelism."""
