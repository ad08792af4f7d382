"""Small complete checkpoints without training and without torch."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from trainctl.config.schema import ModelConfig
from trainctl.plans.identity import model_description
from trainctl.plans.mup import multipliers
from trainctl.runs import checkpoints
from trainctl.runs.attempts import config_of
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import FORMAT, write_manifest


def save(
    run: RunPaths,
    step: int,
    *,
    files: int = 1,
    numel: int = 4,
    width: int = 32,
    leave_out: tuple[str, ...] = (),
    **facts: Any,
) -> Path:
    """Commit a checkpoint: each file has one parameter of zeros, in two fragments.

    Args:
        run: Run; its directory need not exist.
        files: Number of files, one per rank.
        numel: Elements of each parameter.
        width: Size of each file's header after padding, in bytes; a multiple of 8.
        leave_out: Fields to leave out of the manifest.
        facts: Fields of the manifest to change; `weights_only` chooses the kind.
    """
    weights_only = facts.get("weights_only", False)
    folder = checkpoints.temporary_path(run, step, weights_only=weights_only)
    folder.mkdir(parents=True)
    model = config_of(run).model if run.config.is_file() else ModelConfig()
    shapes = {f"parameter.{rank}": [numel] for rank in range(files)}
    entries, fragments = [], []
    for rank in range(files):
        name, content = f"rank-{rank:05d}.safetensors", tensor_file({"master/0": numel}, width)
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entries.append({"name": name, "bytes": len(content), "sha256": digest})
        for start, end in ((0, numel // 2), (numel // 2, numel)):
            fragments.append(
                {
                    "parameter": f"parameter.{rank}",
                    "start": start,
                    "numel": end - start,
                    "file": name,
                    "tensor": 0,
                    "offset": start,
                }
            )
    manifest = {
        "format": FORMAT,
        "run": checkpoints.manifest_run_id(run) or "",
        "model": model_description(model, shapes),
        "multipliers": multipliers(model),
        "weights_only": False,
        "step": step,
        "attempt": 1,
        "samples": 0,
        "tokens": 0,
        "metrics": {},
        "corpus_digest": "",
        "shapes": shapes,
        "states": ["master"],
        "scalars": {},
        "files": entries,
        "fragments": fragments,
        **facts,
    }
    write_manifest(folder, {k: v for k, v in manifest.items() if k not in leave_out})
    return checkpoints.commit_checkpoint(run, step, weights_only=weights_only)


def tensor_file(numels: dict[str, int], width: int = 32) -> bytes:
    """Write a safetensors file of flat fp32 tensors of zeros."""
    header, end = {}, 0
    for name, numel in numels.items():
        begin, end = end, end + 4 * numel
        header[name] = {"dtype": "F32", "shape": [numel], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(max(width, math.ceil(len(text) / 8) * 8))
    return len(text).to_bytes(8, "little") + text + bytes(end)
