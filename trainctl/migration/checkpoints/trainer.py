"""Checkpoints of transformers' Trainer and of accelerate's `save_state`, read; those of the Trainer
are written too, as folders that it resumes from.

Beside the weights lies the optimizer: a state dict of torch (`optimizer.pt`, `optimizer.bin`),
distributed checkpoints of FSDP (`pytorch_model_fsdp_0`, `optimizer_0`), or a checkpoint of
DeepSpeed. Names of files are those of transformers/trainer.py and accelerate/utils/constants.py.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR
from torch.serialization import skip_data
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import get_parameter_names

from trainctl.config.reading import read_json
from trainctl.config.schema import RunConfig
from trainctl.errors import RunStateError, TrainctlError
from trainctl.migration.checkpoints import deepspeed
from trainctl.migration.checkpoints.dcp import DcpFolder, DcpSource, newest_step
from trainctl.migration.checkpoints.source import Source, SourceProgress, without_wrappers
from trainctl.migration.checkpoints.to_torch import ExportedRun
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
from trainctl.plans.optimizers import parameter_groups
from trainctl.runs.files import write_json
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.export.directory import export
from trainctl.train.export.output import ExportedCheckpoint, new_folder
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


SCHEDULER = "scheduler.pt"


def export_trainer(
    config: RunConfig, checkpoint: Path, out: Path, *, progress: OnUnits = ignore_progress
) -> ExportedCheckpoint:
    """Write a folder that `Trainer.train(resume_from_checkpoint=...)` continues from.

    Weights and states are in fp32. The learning rate goes on by the Trainer's own schedule, from
    this step.

    Raises:
        TrainctlError: See `ExportedRun.open`; or the folder cannot be written.
    """
    run = ExportedRun.open(config, checkpoint, "trainer")
    weights = run.num_bytes // (1 + len(run.states))
    decayed, others = trainer_groups(run.model)
    groups = [(decayed, config.optimizer.weight_decay), (others, 0.0)]
    _note_other_groups(config, run, groups)
    optimizer = run.optimizer([(names, {"weight_decay": decay}) for names, decay in groups])
    with new_folder(out, run.num_bytes) as folder:
        model = folder / "model"
        exported = export(
            config,
            checkpoint,
            model,
            dtype=torch.float32,
            progress=lambda done, total: progress(done, run.num_bytes),
        )
        for file in model.iterdir():
            file.rename(folder / file.name)
        model.rmdir()
        _write_optimizer(
            folder / OPTIMIZERS[0],
            run,
            [*decayed, *others],
            optimizer.state_dict()["param_groups"],
            lambda done: progress(weights + done, run.num_bytes),
        )
        torch.save(_scheduler(run, optimizer), folder / SCHEDULER)
        write_json(folder / STATE, _state(run))
    run.notes += exported.notes
    return run.result(out)


def _note_other_groups(
    config: RunConfig, run: ExportedRun, groups: Sequence[tuple[Sequence[str], float]]
) -> None:
    """Note parameters whose settings the Trainer's groups, with their decay, do not have."""
    own = {name: group for group in parameter_groups(config) for name in group.parameters}
    others = [
        name
        for names, decay in groups
        for name in names
        if own[name].weight_decay != decay or own[name].lr_factor != 1
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        run.notes.append(
            f"{others[0]}{more} will have the weight decay and the learning rate of the Trainer's "
            "own two groups: with decay, and without (norms and biases)"
        )


def _write_optimizer(
    path: Path,
    run: ExportedRun,
    names: Sequence[str],
    groups: list[dict[str, Any]],
    progress: Callable[[int], None],
) -> None:
    """Write a file of `torch.save` with the optimizer's state dict, one tensor at a time.

    torch pickles the state dict of tensors without values into a sparse file, whose pickle is
    taken; the tensors are written after it in the order in which the pickle refers to them.
    """
    with FakeTensorMode():
        state = {
            index: {
                **{name: torch.empty(()) for name in run.scalars()},
                **{name: torch.empty(run.shapes[parameter]) for name in run.states},
            }
            for index, parameter in enumerate(names)
        }
    sparse = path.with_suffix(".tmp")
    with skip_data(materialize_fake_tensors=True):
        torch.save({"state": state, "param_groups": groups}, sparse)
    tensors = chain.from_iterable(
        chain(run.scalars().values(), (run.read(parameter, each) for each in run.states))
        for parameter in names
    )
    done = 0
    # torch reads entries of any alignment, unless it is told to map the file.
    with zipfile.ZipFile(sparse) as archive, zipfile.ZipFile(path, "w") as written:
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition("/")
            if not name.startswith("data/"):
                written.writestr(entry.filename, archive.read(entry))
        for index, tensor in enumerate(tensors):
            with written.open(f"{folder}/data/{index}", "w", force_zip64=True) as stream:
                stream.write(tensor.reshape(-1).view(torch.uint8).numpy())
            done += tensor.nbytes
            progress(done)
            del tensor  # before the next one is read
    sparse.unlink()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _scheduler(run: ExportedRun, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of a scheduler of torch at this step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    state: dict[str, Any] = LambdaLR(optimizer, lambda step: 1.0).state_dict()
    return state | {"last_epoch": run.step, "_step_count": run.step + 1, "_last_lr": rates}


def _state(run: ExportedRun) -> dict[str, Any]:
    """Return the Trainer's record of its progress, from which it also takes intervals of steps."""
    plan = run.plan
    every = {
        "logging_steps": 1,
        "eval_steps": plan.config.training.evaluate_every_steps,
        "save_steps": plan.config.checkpoint.every_steps,
    }
    state = TrainerState(
        epoch=0.0,
        global_step=run.step,
        max_steps=plan.total_steps,
        num_input_tokens_seen=run.saved.manifest["tokens"],
        train_batch_size=plan.batch.micro_batch_size,
        **{name: steps for name, steps in every.items() if steps is not None},
    )
    run.notes.append(
        f"the Trainer goes on with logging_steps={state.logging_steps}, eval_steps="
        f"{state.eval_steps} and save_steps={state.save_steps}, which it takes from {STATE}"
    )
    return asdict(state)
