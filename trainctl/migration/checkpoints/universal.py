"""Reader of DeepSpeed's universal checkpoints: a folder of files for each parameter.

Layout (deepspeed/checkpoint/ds_to_universal.py, 0.19): `zero/NAME/fp32.pt`, `exp_avg.pt`,
`exp_avg_sq.pt`, each a dictionary with the whole tensor as `param`, and `step.pt`; beside them the
files `*_model_states.pt` of the checkpoint that was converted, and `zero/optimizer_state.pt`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints.deepspeed import hyperparameters, step_of
from trainctl.migration.checkpoints.source import Source, SourceProgress
from trainctl.migration.checkpoints.unpickle import LazyTensor, TorchFile, damaged, read_pointer
from trainctl.train.checkpoint.optimizer_state import MASTER

WEIGHTS = "fp32"
"""Name of the master weights among the files of a parameter."""

POINTER = "latest_universal"
"""File that names the folder of the newest step."""


def is_here(directory: Path) -> bool:
    """Return True if the directory, or the newest step in it, holds a universal checkpoint."""
    return (_step_folder(directory) / "zero").is_dir()


def _step_folder(directory: Path) -> Path:
    pointer = directory / POINTER
    return directory / read_pointer(pointer) if pointer.is_file() else directory


def open_source(directory: Path) -> Source:
    """Open a universal checkpoint.

    Raises:
        TrainctlError: A file is missing or damaged (exit code 5); names it.
    """
    return UniversalSource(directory)


class UniversalSource(Source):
    """A universal checkpoint of DeepSpeed."""

    format = "universal"

    def __init__(self, directory: Path) -> None:
        self.path, self.notes = directory, []
        folder = _step_folder(directory)
        self._files: list[TorchFile] = []
        self._tensors: dict[str, dict[str, LazyTensor]] = {}
        self.shapes = {}
        steps = set()
        for parent in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
            files = {path.stem: path for path in sorted(parent.glob("*.pt"))}
            if WEIGHTS not in files:
                raise damaged(parent / f"{WEIGHTS}.pt", "it is missing")
            if "step" in files:
                steps.add(_number(self._open(files.pop("step")), files[WEIGHTS]))
            held = {name: self._tensor(path) for name, path in files.items()}
            held[MASTER] = held.pop(WEIGHTS)
            self._tensors[parent.name] = held
            self.shapes[parent.name] = held[MASTER].shape
        self._require_all_states(folder)
        self._read_facts(folder, steps)

    def read(self, parameter: str, state: str, start: int, end: int) -> torch.Tensor:
        return self._tensors[parameter][state].read(start, end)

    def verify(self) -> None:
        for file in self._files:
            file.verify()

    def _open(self, path: Path) -> Any:
        self._files.append(TorchFile(path))
        return self._files[-1].content

    def _tensor(self, path: Path) -> LazyTensor:
        content = self._open(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, LazyTensor):
            raise damaged(path, "it has no tensor")
        return tensor

    def _require_all_states(self, folder: Path) -> None:
        """Refuse a checkpoint in which some parameters lack a state, or it has another shape.

        DeepSpeed writes the weights alone of a tied weight's second name.
        """
        names = {state for held in self._tensors.values() for state in held}
        alone = [name for name, held in self._tensors.items() if held.keys() == {MASTER}]
        self.untrained = frozenset(alone if len(names) > 1 else ())
        for parameter, held in self._tensors.items():
            for state in sorted(names if parameter not in self.untrained else ()):
                path = folder / "zero" / parameter / f"{state}.pt"
                if state not in held:
                    raise damaged(path, "it is missing")
                if held[state].shape != self.shapes[parameter]:
                    raise damaged(path, "its shape is not that of the weights")
        self.states = (MASTER, *sorted(names - {MASTER}))

    def _read_facts(self, folder: Path, steps: set[float]) -> None:
        if len(steps) > 1:
            raise TrainctlError(f"{folder}: the steps of its parameters differ")
        self.scalars = dict.fromkeys(["step"], steps.pop()) if steps else {}
        facts: dict[str, Any] = {}
        for path in sorted(folder.iterdir()):
            if re.fullmatch(r"(zero_pp_rank_0_)?mp_rank_00_model_states\.pt", path.name):
                facts = self._open(path)
        groups: list[dict[str, Any]] = []
        common = folder / "zero" / "optimizer_state.pt"
        if common.is_file():
            state = self._open(common)
            inner = state.get("base_optimizer_state", state.get("optimizer_state_dict", state))
            groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
            if not steps and (step := step_of(state, groups)) is not None:
                self.scalars = {"step": step}  # after ZeRO 3 there is no step.pt
        self.hyperparameters = hyperparameters(groups)
        self.progress = SourceProgress(
            step=facts.get("global_steps"),
            samples=facts.get("global_samples"),
            learning_rate=self.hyperparameters.get("lr"),
        )


def _number(value: Any, path: Path) -> float:
    if isinstance(value, LazyTensor) and value.numel == 1:
        return value.item()
    if isinstance(value, int | float):
        return float(value)
    raise damaged(path.with_name("step.pt"), "it is no number")
