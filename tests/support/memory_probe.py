"""Runs inside a rank: growth of its peak memory while a ZeRO-3 model is built."""

from pathlib import Path
from typing import Any

import torch

from trainctl.engines.deepspeed.partition import Partitioner
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.weights import SeedWeights


def status_bytes(name: str) -> int:
    """Return a size from /proc/self/status, such as VmRSS, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name} in /proc/self/status")


def growth(cases: list[Any], process: Any) -> dict[str, int]:
    """Return the growth of the peak in bytes, and the sizes to compare it with."""
    plan = cases[0].plan
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    model = skeleton(plan.config.model, torch.float32)
    total = sum(p.numel() for p in model.parameters()) * 4
    block = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    source = SeedWeights(1, std=0.02)
    make = Partitioner(plan.deepspeed, model, process.device)
    materialise(model, source, process.device, make=make)
    return {
        "growth": status_bytes("VmHWM") - before,
        "shard": total // process.world_size,
        "block": block,
    }
