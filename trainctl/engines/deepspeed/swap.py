"""Folder, one for each run, of the files that DeepSpeed swaps to NVMe."""

from __future__ import annotations

import hashlib
import os
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.engines.process import Process
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths

_SECTIONS = ("offload_optimizer", "offload_param")


def with_own_swap_folder(plan: RunPlan, run: RunPaths, process: Process) -> RunPlan:
    """Return the plan with an emptied swap folder of this run; on all ranks together.

    The folder lies below `offload.nvme_path`. DeepSpeed names its files by rank and parameter only:
    two runs that share a drive would overwrite each other's states. Files that a dead attempt left
    there are removed.
    """
    if not _nvme_folders(plan.deepspeed):
        return plan
    digest = hashlib.sha256(str(run.root.resolve()).encode()).hexdigest()[:12]
    deepspeed = deepcopy(plan.deepspeed)
    for section in _nvme_sections(deepspeed):
        section["nvme_path"] = str(Path(section["nvme_path"]) / f"{run.root.name}-{digest}")
    if int(os.environ["LOCAL_RANK"]) == 0:
        _remove_folders(deepspeed)
    process.barrier()
    return replace(plan, deepspeed=deepspeed)


def remove_swap_folder(plan: RunPlan) -> None:
    """Remove this run's swap files from this machine, once no rank uses them."""
    _remove_folders(plan.deepspeed)


def _remove_folders(deepspeed: dict[str, Any]) -> None:
    for folder in _nvme_folders(deepspeed):
        shutil.rmtree(folder, ignore_errors=True)  # other ranks remove the folder too


def _nvme_folders(deepspeed: dict[str, Any]) -> set[str]:
    return {section["nvme_path"] for section in _nvme_sections(deepspeed)}


def _nvme_sections(deepspeed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sections of the JSON that name an NVMe folder."""
    zero = deepspeed.get("zero_optimization", {})
    return [zero[name] for name in _SECTIONS if "nvme_path" in zero.get(name, {})]
