"""Reader of checkpoints of transformers' Trainer and of accelerate's `save_state`.

Beside the weights lies the optimizer: a state dict of torch (`optimizer.pt`, `optimizer.bin`),
distributed checkpoints of FSDP (`pytorch_model_fsdp_0`, `optimizer_0`), or a checkpoint of
DeepSpeed. Names of files are those of transformers/trainer.py and accelerate/utils/constants.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from trainctl.config.reading import read_json
from trainctl.errors import RunStateError, TrainctlError
from trainctl.migration.checkpoints import deepspeed
from trainctl.migration.checkpoints.dcp import DcpFolder, DcpSource, newest_step
from trainctl.migration.checkpoints.names import without_wrappers
from trainctl.migration.checkpoints.source import Source, SourceProgress
from trainctl.migration.checkpoints.torch_states import (
    DERIVED,
    Readable,
    SavedOptimizer,
    TorchSource,
    match_weights,
    unusable,
)
from trainctl.migration.checkpoints.unpickle import TorchFile, damaged
from trainctl.migration.configs.pickled import read_pickled
from trainctl.models.hf_weights import StoredModel
from trainctl.models.tensors import INDEX, ONE_FILE, has_weights, stored_tensors
from trainctl.train.models.weights import SafetensorsWeights
from trainctl.untrusted import safe_name

STATE = "trainer_state.json"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
FSDP_PICKLED, FSDP_WEIGHTS, FSDP_OPTIMIZER = (
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0",
    "optimizer_0",
)

_TYPES = {"F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights in safetensors beside fp32."""

NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of the Trainer's second group (`Trainer.get_decay_parameter_names`)."""


def is_here(directory: Path) -> bool:
    path = _newest(directory)
    if any((path / name).is_file() for name in (STATE, *OPTIMIZERS)):
        return True
    return (path / FSDP_WEIGHTS).is_dir()


def open_source(directory: Path) -> Source:
    path = _newest(directory)
    if _has_deepspeed(path):
        source: Source = deepspeed.open_source(path)
    elif (path / FSDP_WEIGHTS).is_dir():
        listed = [path / FSDP_WEIGHTS, path / FSDP_OPTIMIZER]
        source = DcpSource("trainer", path, [DcpFolder(each) for each in listed])
    else:
        source = FilesSource(path)
    source.format, source.path = "trainer", path
    if (path / STATE).is_file():
        source.progress = _progress(path, source)
    if any(path.glob("rng_state*")) or any(path.glob("random_states_*")):
        source.notes.append(
            "its random states are not carried over: here dropout and the order of samples are "
            "functions of training.seed"
        )
    if (path / "scaler.pt").is_file():
        source.notes.append("the loss scale of fp16 is not carried over: it begins anew")
    return source


def _newest(directory: Path) -> Path:
    """Return the newest checkpoint in the directory that the trainer was told to save in."""
    return newest_step(newest_step(directory, "checkpoint-*"), "checkpoint_*")


def _has_deepspeed(path: Path) -> bool:
    """Return True if DeepSpeed saved the optimizer.

    Raises:
        TrainctlError: What names DeepSpeed's folder is missing, and no other optimizer is there.
    """
    if deepspeed.is_here(path):
        return True
    has_other = any((path / name).is_file() for name in OPTIMIZERS)
    if any(path.glob("global_step*")) and not has_other:
        raise damaged(path / "latest", "it is missing, and it names the folder of DeepSpeed")
    return False


def trainer_groups(model: PreTrainedModel) -> list[list[str]]:
    """Return the names in the Trainer's two parameter groups: with weight decay, and without."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(NOT_DECAYED)))
    groups: list[list[str]] = [[], []]
    for name, _ in model.named_parameters():
        groups[name not in decayed].append(name)
    return groups


class FilesSource(TorchSource):
    """Weights in safetensors or in files of `torch.save`, and an optimizer in one such file."""

    def __init__(self, path: Path) -> None:
        self._files: list[TorchFile] = []
        self._pickled: dict[str, Readable] = {}
        self._safetensors: SafetensorsWeights | None = None
        optimizer = self._optimizer_of(path)
        if has_weights(path):
            with _of_the_source("copy the checkpoint again, or take an older one"):
                shapes = {name: each.shape for name, each in stored_tensors(path).items()}
        else:
            self._pickled = self._pickled_weights(path)
            shapes = {name: tuple(each.shape) for name, each in self._pickled.items()}
        super().__init__("trainer", path, shapes, optimizer, [each.verify for each in self._files])
        if optimizer is not None:
            self.progress = SourceProgress(learning_rate=optimizer.learning_rate)

    def _use_weights(self, model: PreTrainedModel) -> None:
        if self._pickled:
            self._pickled = match_weights(self._pickled, model)
            self.shapes = {name: tuple(each.shape) for name, each in self._pickled.items()}
        else:
            with _of_the_source("the configuration has to name the model: model=hf model.path=DIR"):
                stored = stored_tensors(self.path)
                unused = StoredModel(model, stored).unused
                self._safetensors = SafetensorsWeights(self.path, model)
            self.unchecked = (
                "that no byte of the weights has changed: safetensors have no checksum",
            )
            self.shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
            self.shapes |= {n: stored[n].shape for n in unused if not DERIVED.search(n)}

    def _read_weights(self, parameter: str, start: int, end: int) -> torch.Tensor:
        if self._safetensors is None:
            return self._pickled[parameter].read(start, end)
        return self._safetensors.read(parameter, torch.Size(self.shapes[parameter]), start, end)

    def _weights_type(self) -> torch.dtype:
        if self._safetensors is None:
            return super()._weights_type()
        kinds = {each.dtype for each in stored_tensors(self.path).values()}
        return next((_TYPES[kind] for kind in sorted(kinds) if kind != "F32"), torch.float32)

    def _expected_groups(self, model: PreTrainedModel) -> Sequence[Sequence[str]]:
        return trainer_groups(model) if (self.path / STATE).is_file() else ()

    def _optimizer_of(self, path: Path) -> SavedOptimizer | None:
        for name in OPTIMIZERS:
            if (path / name).is_file():
                self._files.append(TorchFile(path / name))
                return SavedOptimizer.of(path / name, self._files[-1].content)
        return None

    def _pickled_weights(self, path: Path) -> dict[str, Readable]:
        """Return the tensors of a state dict in one file or several.

        Raises:
            TrainctlError: There is none, or a file is missing or damaged; names it.
        """
        names = [name for name in (FSDP_PICKLED, PICKLED) if (path / name).is_file()]
        if (path / PICKLED_INDEX).is_file():
            listed = set(_read_json(path / PICKLED_INDEX)["weight_map"].values())
            names = sorted(map(safe_name, listed))
        if not names and (path / "adapter_config.json").is_file():
            raise unusable(path, "it is of an adapter (PEFT) alone, and not of a whole model")
        if not names:
            raise damaged(path, f"it has no weights: no {ONE_FILE}, {INDEX} or {PICKLED}")
        found: dict[str, Readable] = {}
        for name in names:
            self._files.append(TorchFile(path / name))
            content = self._files[-1].content
            if not isinstance(content, dict):
                raise damaged(path / name, "it holds no weights by name")
            found |= {
                without_wrappers(str(key)): value
                for key, value in content.items()
                if hasattr(value, "read")
            }
        return found


def _progress(path: Path, source: Source) -> SourceProgress:
    """Return what the Trainer's own records say, where the source does not know better."""
    state = _read_json(path / STATE)
    step = state.get("global_step")
    if not isinstance(step, int):
        raise damaged(path / STATE, "it does not say the step (global_step)")
    seen = state.get("num_input_tokens_seen")
    rates = [
        entry["learning_rate"]
        for entry in state.get("log_history", ())
        if isinstance(entry, dict) and isinstance(entry.get("learning_rate"), int | float)
    ]
    known = source.progress
    rate = known.learning_rate
    return replace(
        known,
        step=step,
        samples=_samples(path, state, step, source.notes),
        tokens=seen if isinstance(seen, int) and seen > 0 else None,
        learning_rate=rates[-1] if rate is None and rates else rate,
    )


def _samples(path: Path, state: Mapping[str, Any], step: int, notes: list[str]) -> int | None:
    """Return the samples of `step` whole batches; None if the batch is not known."""
    size, processes = state.get("train_batch_size"), len(list(path.glob("rng_state*.pth")))
    try:
        arguments = read_pickled(path / "training_args.bin")
        accumulated = arguments.get("gradient_accumulation_steps")
    except TrainctlError as error:
        notes.append(f"the Trainer's batch is unknown: {error.message}")
        return None
    if not (isinstance(size, int) and isinstance(accumulated, int) and processes):
        notes.append("the Trainer's batch is unknown")
        return None
    notes.append(
        f"the Trainer's batch was {size} x {accumulated} accumulated x {processes} processes"
    )
    return step * size * accumulated * processes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise damaged(path, f"it cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise damaged(path, "it holds no object")
    return content


@contextmanager
def _of_the_source(hint: str) -> Iterator[None]:
    """Make errors of a model's directory those of a source (exit code 5), with another hint."""
    try:
        yield
    except TrainctlError as error:
        why = error.message.removeprefix("model.initial_weights: ")
        raise RunStateError(why, hint=hint) from None
