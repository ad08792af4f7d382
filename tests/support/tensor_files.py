"""Whole tensors written as checkpoints and exports write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from trainctl.train.checkpoint.content import write_stream


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write tensors to a new safetensors file and sync it."""
    layout = {name: (item.dtype, item.shape) for name, item in tensors.items()}
    return write_stream(path, layout, tensors.values())
