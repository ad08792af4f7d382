"""Universal checkpoints of DeepSpeed, with optimizer states: read, and exported.

DeepSpeed loads one at ZeRO 1, 2 and 3 with `"checkpoint": {"load_universal": true}`, on any number
of ranks. Layout (deepspeed/checkpoint/ds_to_universal.py, 0.19), a folder of files for each
parameter: `zero/NAME/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt`, each a dictionary with the whole
tensor as `param`, and `step.pt`; beside them the files `*_model_states.pt` of the checkpoint that
was converted, and `zero/optimizer_state.pt`.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from trainctl.config.schema import RunConfig
from trainctl.errors import RunStateError, TrainctlError
from trainctl.migration.checkpoints.deepspeed import hyperparameters, step_of
from trainctl.migration.checkpoints.source import Source, SourceProgress
from trainctl.migration.checkpoints.unpickle import LazyTensor, TorchFile, damaged, read_pointer
from trainctl.plans.trainable import is_partial
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.export.output import ExportedCheckpoint, new_folder
from trainctl.untrusted import safe_path

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


_STATES = {MASTER: WEIGHTS, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""DeepSpeed's names of the states; ZeRO 3 loads exactly these (runtime/zero/stage3.py)."""

_GROUPS = 256
"""Parameter groups in the file. DeepSpeed overwrites the settings of its groups with the file's,
and loads no group beyond them; ours have no settings, so those of its configuration apply.
"""

_VERSION = "0.19.8"
"""Version of DeepSpeed whose layout is written: it refuses a file without one."""


def export(
    config: RunConfig,
    checkpoint: Path,
    out: Path,
    *,
    progress: OnUnits = ignore_progress,
) -> ExportedCheckpoint:
    """Write a checkpoint to a new folder that DeepSpeed loads as universal.

    One parameter at a time is in memory.

    Raises:
        TrainctlError: A part of the model is frozen, or the optimizer is not an Adam; or the disk
            is full (exit code 4).
    """
    reader = CheckpointReader(checkpoint)
    _require_adam(config, reader)
    shapes: dict[str, list[int]] = reader.manifest["shapes"]
    total = sum(math.prod(shape) for shape in shapes.values()) * len(_STATES) * 4
    step = reader.progress.step
    tag = f"global_step{step}"
    done = 0
    with new_folder(out, total) as folder:
        for name, shape in shapes.items():
            target = safe_path(folder / tag / "zero", name)
            target.mkdir(parents=True)
            for state, file in _STATES.items():
                values = reader.read_state(name, state, 0, math.prod(shape))
                _save({"param": values.view(shape)}, target / f"{file}.pt")
                done += values.numel() * values.element_size()
                progress(done, total)
            _save(torch.tensor(_step_count(reader)), target / "step.pt")
            reader.close()
        _save(_optimizer_facts(reader), folder / tag / "zero" / "optimizer_state.pt")
        for prefix in ("", "zero_pp_rank_0_"):  # the second is what ZeRO 3 looks for
            _save(_model_facts(reader), folder / tag / f"{prefix}mp_rank_00_model_states.pt")
        (folder / POINTER).write_text(tag)
    notes = [
        "the learning rate and the other settings are those of DeepSpeed's configuration",
        "for torch's Adam at ZeRO 3, make the step counts tensors after loading "
        "(docs/coming-from.md)",
    ]
    if reader.manifest.get("loss_scale"):
        notes.append("the loss scale is not carried over: it begins at its initial value")
    return ExportedCheckpoint(
        files=[POINTER, tag],
        size_bytes=total,
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        notes=notes,
    )


def _require_adam(config: RunConfig, reader: CheckpointReader) -> None:
    """Refuse a checkpoint that the format cannot hold.

    Raises:
        TrainctlError: A part of the model is frozen, or the states are not those of Adam.
    """
    if is_partial(config):
        raise TrainctlError(
            "--to deepspeed-universal has no place for frozen weights",
            hint="without --to, the whole model is exported without optimizer states",
        )
    missing = set(_STATES) - set(reader.manifest["states"])
    if missing:
        raise RunStateError(
            f"{reader.path.name} has no {' and no '.join(sorted(missing))}, which DeepSpeed's "
            f"universal format needs (optimizer={config.optimizer.kind})",
            hint="without --to, the weights are exported without optimizer states",
        )


def _step_count(reader: CheckpointReader) -> float:
    return float(reader.manifest["scalars"].get("step", reader.progress.step))


def _optimizer_facts(reader: CheckpointReader) -> dict[str, Any]:
    """Return `optimizer_state.pt`; ZeRO 3 reads the step count there, not in `step.pt`.

    ZeRO 3 gives the same object to all its sub-groups (runtime/zero/stage3.py). A tensor would be
    increased once for each of them in every step, so the count is a number.
    """
    groups: list[dict[str, Any]] = [{} for _ in range(_GROUPS)]
    states = {0: {"step": int(_step_count(reader))}}
    return {
        "ds_version": _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
    }


def _model_facts(reader: CheckpointReader) -> dict[str, Any]:
    """Return the counters of the training; weights are in `zero/`."""
    step, samples = reader.progress.step, reader.progress.samples
    shapes = {name: torch.Size(shape) for name, shape in reader.manifest["shapes"].items()}
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        # DeepSpeed's schedulers count from -1 and read the first key, torch's the others.
        "lr_scheduler": {
            "last_batch_iteration": step - 1,
            "last_epoch": step,
            "_step_count": step + 1,
            "lr_lambdas": [],
        },
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": samples,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {},
    }


def _save(content: Any, path: Path) -> None:
    with path.open("xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
