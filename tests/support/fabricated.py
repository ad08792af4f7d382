"""Checkpoint without training: random master weights, each parameter in two fragments."""

from __future__ import annotations

from pathlib import Path

import torch
from tensor_files import write_tensors

from trainctl.config.schema import ModelConfig
from trainctl.plans.identity import model_description
from trainctl.plans.mup import multipliers
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import FORMAT, write_manifest
from trainctl.train.models.model import skeleton


def fabricate(run: RunPaths, model: ModelConfig, *, step: int = 1, deviation: float = 0.02) -> Path:
    """Commit the checkpoint, with the files of two ranks as ZeRO-3 partitions."""
    folder = checkpoints.temporary_path(run, step)
    folder.mkdir(parents=True)
    shapes = {name: p.shape for name, p in skeleton(model, torch.float32).named_parameters()}
    files, fragments = [], []
    for rank in range(2):
        file, offset, parts = f"rank-{rank:05d}.safetensors", 0, []
        for name, shape in shapes.items():
            half = -(-shape.numel() // 2)
            start = rank * half
            numel = min(half, shape.numel() - start)
            parts.append(torch.randn(numel) * deviation)
            fragments.append(
                {"parameter": name, "start": start, "numel": numel,
                 "file": file, "tensor": 0, "offset": offset}
            )  # fmt: skip
            offset += numel
        size, digest = write_tensors(folder / file, {"master/0": torch.cat(parts)})
        files.append({"name": file, "bytes": size, "sha256": digest})
    listed = {name: list(shape) for name, shape in shapes.items()}
    write_manifest(
        folder,
        {
            "format": FORMAT,
            "run": checkpoints.manifest_run_id(run) or "",
            "model": model_description(model, listed),
            "weights_only": False,
            "step": step,
            "samples": 0,
            "tokens": 0,
            "metrics": {},
            "corpus_digest": "",
            "states": ["master"],
            "scalars": {},
            "multipliers": multipliers(model),
            "shapes": listed,
            "files": files,
            "fragments": fragments,
        },
    )
    return checkpoints.commit_checkpoint(run, step)
