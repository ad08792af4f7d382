"""Saving and loading the whole state of a run, in a form that knows nothing of the layout.

Each rank writes the optimizer tensors that it holds (master weights and every state) to one
safetensors file; the manifest says which elements of which parameter lie where. A loader on any
layout reads the ranges that it needs. No file is ever unpickled.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from trainctl import __version__
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs import checkpoints
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import RunPaths
from trainctl.train.process import Process
from trainctl.train.state import MASTER, OptimizerState
from trainctl.train.tensor_file import write_tensors


@dataclass(slots=True)
class Progress:
    """Where the run is: what a resume needs besides the tensors.

    Attributes:
        step: Optimizer steps done.
        samples: The next sample counter; not step x batch, since batches may be skipped or grow.
        tokens: Tokens trained on.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0


def save(
    run: RunPaths,
    process: Process,
    state: OptimizerState,
    progress: Progress,
    *,
    shapes: dict[str, list[int]],
    metrics: dict[str, float],
    layout: dict[str, int],
    corpus_digest: str,
) -> Path:
    """Write a checkpoint aside and commit it; every rank takes part.

    Args:
        shapes: Of every parameter, by canonical name.
        metrics: Of the evaluation at this step; may be empty.
        layout: Mesh and ZeRO stage, for the reader's information only.
        corpus_digest: Of the corpus that `progress.samples` counts in.

    Returns:
        The committed folder.

    Raises:
        TrainctlError: A rank could not write; nothing is left of this checkpoint, older ones stay.
    """
    folder = checkpoints.temporary_path(run, progress.step)
    problem = ""
    if process.is_first:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            problem = str(error)
    process.barrier()
    part: dict[str, Any] = {}
    if not problem:
        try:
            part = _write_part(folder, process.rank, state)
        except OSError as error:
            problem = f"rank {process.rank}: {error}"
    _agree(process, folder, problem)
    parts: list[Any] = [None] * process.world_size
    dist.all_gather_object(parts, part, group=process.control)
    if process.is_first:
        try:
            manifest = {
                "format": checkpoints.FORMAT,
                "trainctl": __version__,
                "step": progress.step,
                "samples": progress.samples,
                "tokens": progress.tokens,
                "metrics": metrics,
                "layout": layout,
                "corpus_digest": corpus_digest,
                "states": [MASTER, *parts[0]["states"]],
                "scalars": parts[0]["scalars"],
                "shapes": shapes,
                "files": [item["file"] for item in parts],
                "fragments": [fragment for item in parts for fragment in item["fragments"]],
            }
            write_json(folder / checkpoints.MANIFEST, manifest)
            checkpoints.commit(run, progress.step)
        except OSError as error:
            problem = str(error)
    _agree(process, folder, problem)
    return run.checkpoints / checkpoints.checkpoint_name(progress.step)


def _write_part(folder: Path, rank: int, state: OptimizerState) -> dict[str, Any]:
    """Write this rank's file; its entries for the manifest."""
    owned = [fragment for fragment in state.fragments if fragment.owned]
    names = state.state_names()
    tensors = {
        f"{name}/{index}": state.tensor(index, name)
        for index in sorted({fragment.tensor for fragment in owned})
        for name in (MASTER, *names)
    }
    file = f"rank-{rank:05d}.safetensors"
    size, digest = write_tensors(folder / file, tensors)
    return {
        "file": {"name": file, "bytes": size, "sha256": digest},
        "states": names,
        "scalars": state.scalars(),
        "fragments": [
            {
                "parameter": fragment.name,
                "start": fragment.start,
                "numel": fragment.numel,
                "file": file,
                "tensor": fragment.tensor,
                "offset": fragment.offset,
            }
            for fragment in owned
        ],
    }


def _agree(process: Process, folder: Path, problem: str) -> None:
    """Go on only if no rank has a problem; otherwise clear up and fail on all of them."""
    if not process.any(bool(problem)):
        return
    problems: list[Any] = [None] * process.world_size
    dist.all_gather_object(problems, problem, group=process.control)
    if process.is_first:
        shutil.rmtree(folder, ignore_errors=True)
    first = next(item for item in problems if item)
    raise TrainctlError(
        f"the checkpoint could not be saved: {first}",
        hint="earlier checkpoints are untouched; free space and resume",
        exit_code=ExitCode.environment,
    )


class Checkpoint:
    """A committed checkpoint, read by ranges.

    Also a source of weights: the master weights under their canonical names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = checkpoints.read_manifest(path)
        self._fragments: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for fragment in self.manifest["fragments"]:
            self._fragments[fragment["parameter"]].append(fragment)
        self._open: dict[str, Any] = {}

    @property
    def progress(self) -> Progress:
        return Progress(self.manifest["step"], self.manifest["samples"], self.manifest["tokens"])

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of a parameter's master weights."""
        saved = self.manifest["shapes"].get(name)
        if saved != list(shape):
            raise TrainctlError(
                f"{self.path.name}: {name} has shape {saved}, the model's is {list(shape)}",
                hint="a run's model cannot change; start a new run",
                exit_code=ExitCode.run_state,
            )
        return self._read(name, MASTER, start, end)

    def load_into(self, state: OptimizerState) -> None:
        """Fill the master weights and every optimizer state that this rank holds."""
        names = [name for name in self.manifest["states"] if name != MASTER]
        if names:
            state.create(names, self.manifest["scalars"])
        for fragment in state.fragments:
            end = fragment.start + fragment.numel
            for name in (MASTER, *names):
                target = state.tensor(fragment.tensor, name)
                target[fragment.offset : fragment.offset + fragment.numel].copy_(
                    self._read(fragment.name, name, fragment.start, end)
                )

    def _read(self, parameter: str, state: str, start: int, end: int) -> torch.Tensor:
        result = torch.empty(end - start)
        missing = end - start
        for fragment in self._fragments[parameter]:
            first = max(start, fragment["start"])
            last = min(end, fragment["start"] + fragment["numel"])
            if first < last:
                shift = fragment["offset"] - fragment["start"]
                values = self._file(fragment["file"]).get_slice(f"{state}/{fragment['tensor']}")
                result[first - start : last - start] = values[first + shift : last + shift]
                missing -= last - first
        if missing:
            raise TrainctlError(
                f"{self.path.name}: {missing} elements of {parameter} ({state}) are missing",
                exit_code=ExitCode.run_state,
            )
        return result

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / Path(name).name, framework="pt")
        return self._open[name]
