"""A run's checkpoint with its optimizer, in the terms of torch's optimizers.

An export for torch's distributed checkpoints is read by `dcp.load` on any layout.

An export is proven: every number is read back and compared. The weights are loaded by the library
that the export is for, where it loads them without a training of its own. All states are read by
the importer of the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import RunConfig
from trainctl.errors import RunStateError, TrainctlError
from trainctl.migration.checkpoints.source import open_source
from trainctl.models.hf_weights import tied_names
from trainctl.options.optimizer import Maker, spec_of
from trainctl.plans.deepspeed import optimizer_parameter
from trainctl.plans.mup import multipliers
from trainctl.plans.optimizers import parameter_groups
from trainctl.plans.schedule import Curve
from trainctl.plans.trainable import is_partial
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import OnUnits, ignore_progress
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.export.check import (
    CheckedExport,
    ExportCase,
    TransformersTarget,
    check_directory,
    compare,
    rounding_to,
)
from trainctl.train.export.output import ExportedCheckpoint, new_folder
from trainctl.train.models.encoders import auto_class
from trainctl.train.models.model import skeleton, with_portable_attention

PIECE = 1 << 22
"""Elements that are copied at a time: 16 MiB in fp32."""


@dataclass(slots=True)
class ExportedRun:
    """A run's checkpoint, opened to be written with its optimizer.

    Attributes:
        saved: The checkpoint.
        plan: Plan of the run's newest attempt that trained.
        model: Its model, without values.
        states: Elementwise states of the optimizer.
        notes: Remarks to show the user.
    """

    saved: CheckpointReader
    plan: RunPlan
    model: PreTrainedModel
    states: tuple[str, ...]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, config: RunConfig, checkpoint: Path, to: str) -> ExportedRun:
        """Open a checkpoint.

        Args:
            to: Name of the format, for errors.

        Raises:
            TrainctlError: torch has no such optimizer, or the run trains a part of its model; or
                the checkpoint has no optimizer, or is of another model (exit code 5).
        """
        spec = spec_of(config.optimizer)
        if spec.made_by is not Maker.torch or spec.deepspeed is None or not spec.states:
            raise TrainctlError(
                f"--to {to} writes the states of optimizers that torch has, and "
                f"optimizer={config.optimizer.kind} is none",
                hint="--to transformers writes the weights",
            )
        if is_partial(config):
            raise TrainctlError(
                f"--to {to} is not for a run that trains a part of its model",
                hint="--to transformers merges an adapter",
            )
        if any(value != 1 for value in multipliers(config.model).values()):
            raise TrainctlError(
                f"--to {to} is not for model.mup: its multipliers are no part of the states",
                hint="--to transformers folds them into the weights",
            )
        run = RunPaths(checkpoint.parent.parent)
        plan = read_plan(run.attempt(effective_attempt(run).number).plan)
        saved = CheckpointReader(checkpoint)
        model = skeleton(config.model, torch.float32)
        saved.check(config.model, {n: list(p.shape) for n, p in model.named_parameters()})
        if not saved.was_updated:
            raise RunStateError(
                f"{checkpoint.name} has no optimizer states",
                hint="--to transformers writes the weights",
            )
        states = spec.states_of(config.optimizer, is_matrix=False)
        return cls(saved, plan, model, tuple(states))

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of the parameters, in the model's order."""
        return {name: each.shape for name, each in self.model.named_parameters()}

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.saved.manifest["step"])

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and the states in fp32."""
        return 4 * (1 + len(self.states)) * sum(map(math.prod, self.shapes.values()))

    def read(self, parameter: str, state: str) -> torch.Tensor:
        """Return a parameter's weights or one of its states, whole, in fp32."""
        shape = self.shapes[parameter]
        values = torch.empty(shape)
        flat = values.view(-1)
        for start in range(0, shape.numel(), PIECE):
            end = min(start + PIECE, shape.numel())
            flat[start:end] = self.saved.read_state(parameter, state, start, end)
        self.saved.close()  # else the pages that were read would count as this process's memory
        return values

    def scalars(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's numbers, as torch holds them for each parameter."""
        return {name: torch.tensor(float(v)) for name, v in self.saved.manifest["scalars"].items()}

    def optimizer(
        self, groups: Sequence[tuple[Sequence[str], Mapping[str, float]]]
    ) -> torch.optim.Optimizer:
        """Return torch's optimizer on parameters without values, with the settings of this step.

        Args:
            groups: Names in each group, with settings that differ from the optimizer's own. A
                `lr_factor` among them multiplies the learning rate.
        """
        form = spec_of(self.plan.config.optimizer).deepspeed
        assert form is not None
        parameters, settings = dict(self.model.named_parameters()), {}
        for each in form.parameters:
            value = optimizer_parameter(self.plan.config, each, self.plan.lr_scale)
            settings[value.key.rpartition(".")[2]] = value.value
        factor = Curve.of(self.plan).factor(self.step)
        given = []
        for names, own in groups:
            peak = settings["lr"] * own.get("lr_factor", 1.0)
            rates = {"initial_lr": peak, "lr": peak * factor}
            rest = {name: value for name, value in own.items() if name != "lr_factor"}
            given.append({"params": [parameters[name] for name in names], **rates, **rest})
        made: torch.optim.Optimizer = getattr(torch.optim, form.type)(given, **settings)
        return made

    def result(self, out: Path) -> ExportedCheckpoint:
        """Return the result of an export to a folder."""
        return ExportedCheckpoint(
            files=sorted(path.name for path in out.iterdir()),
            size_bytes=self.num_bytes,
            num_parameters=sum(shape.numel() for shape in self.shapes.values()),
            notes=self.notes,
        )


def check_trainer(config: RunConfig, checkpoint: Path, out: Path) -> CheckedExport:
    """Check a folder for transformers' Trainer: its model by transformers, and all states."""
    checked = check_directory(config, checkpoint, out, dtype=torch.float32)
    return _compare_states(checked, config, checkpoint, out, "trainer")


def check_dcp(config: RunConfig, checkpoint: Path, out: Path) -> CheckedExport:
    """Check a distributed checkpoint: its model by `dcp.load`, and all states."""
    case = ExportCase(config, checkpoint, out, torch.float32)
    checked = compare(case, partial(_DcpTarget, case), rounding_to(torch.float32))
    return _compare_states(checked, config, checkpoint, out, "dcp")


def check_universal(config: RunConfig, checkpoint: Path, out: Path) -> CheckedExport:
    """Check a universal checkpoint: all states. DeepSpeed loads it in an engine alone."""
    checked = CheckedExport("trainctl's importer")
    return _compare_states(checked, config, checkpoint, out, "universal")


class _DcpTarget(TransformersTarget):
    """A model of transformers with the weights that torch loads from a distributed checkpoint."""

    def __init__(self, case: ExportCase) -> None:
        super().__init__(case)
        self.library = f"torch {torch.__version__}"

    def _load(self, case: ExportCase, **trusts: bool) -> Any:
        shape = skeleton(with_portable_attention(case.config.model), torch.float32).config
        has_score = case.config.model.score_outputs is not None
        kind = auto_class(shape, has_score=has_score)
        model = kind.from_config(shape, dtype=torch.float32, **trusts)
        weights = model.state_dict()
        dcp.load({"model": weights}, checkpoint_id=str(case.out), no_dist=True)
        return model.eval()

    def stops_at(self, token: int) -> bool:
        return True  # the format has weights and states alone


def _compare_states(
    checked: CheckedExport, config: RunConfig, checkpoint: Path, out: Path, format: str
) -> CheckedExport:
    """Compare all weights and states bit for bit; add the result."""
    saved, source = CheckpointReader(checkpoint), open_source(out, format)
    model = skeleton(with_portable_attention(config.model), torch.float32)
    source.use_model(model)
    differing = []
    for name, parameter in model.named_parameters():
        for state in source.states:
            equal = True
            for start in range(0, parameter.numel(), PIECE):
                end = min(start + PIECE, parameter.numel())
                ours = saved.read_state(name, state, start, end)
                equal &= torch.equal(source.read(name, state, start, end), ours)
            checked.states += parameter.numel()
            if not equal:
                differing.append(f"{name} ({state})")
        saved.close()
    source.verify()
    if differing:
        more = f" and {len(differing) - 1:,} more" if len(differing) > 1 else ""
        checked.differences.append(f"{differing[0]}{more} differs from the checkpoint's")
    scalars = dict(saved.manifest["scalars"])
    if dict(source.scalars) != scalars:
        checked.differences.append(f"the optimizer's numbers are {source.scalars}, not {scalars}")
    if source.progress.step != saved.manifest["step"]:
        checked.differences.append(f"the step is {source.progress.step}")
    return checked


def export_dcp(
    config: RunConfig, checkpoint: Path, out: Path, *, progress: OnUnits = ignore_progress
) -> ExportedCheckpoint:
    """Write weights and optimizer states to a new folder, by torch's own writer.

    The keys are those of `{"model": ..., "optimizer": ...}` with the state dicts of
    `torch.distributed.checkpoint.state_dict`. The optimizer's settings are there by group and,
    for `flatten_optimizer_state_dict`, by parameter. `trainer` has the step, samples and tokens.

    Raises:
        TrainctlError: See `ExportedRun.open`; or the folder cannot be written.
    """
    run = ExportedRun.open(config, checkpoint, "dcp")
    optimizer, planner = _optimizer_state(config, run), _Planner(run, progress)
    content: dict[str, Any] = {
        "model": {name: torch.empty(shape, device="meta") for name, shape in run.shapes.items()},
        "optimizer": optimizer,
        "trainer": {name: run.saved.manifest[name] for name in ("step", "samples", "tokens")},
    }
    for group in optimizer["param_groups"]:
        for key, value in group.items():
            if key != "params":
                for name in group["params"]:
                    content[f"optimizer.param_groups.{name}.{key}"] = value
    with new_folder(out, run.num_bytes) as folder:
        writer = _Writer(folder, tied_names(run.model))
        dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)
    return run.result(out)


def _optimizer_state(config: RunConfig, run: ExportedRun) -> dict[str, Any]:
    """Return the optimizer's state dict by names, with tensors without values."""
    groups = [
        (
            group.parameters,
            {"weight_decay": group.weight_decay, "lr_factor": group.lr_factor},
        )
        for group in parameter_groups(config)
    ]
    saved = run.optimizer(groups).state_dict()["param_groups"]
    for (names, _), group in zip(groups, saved, strict=True):
        group["params"] = list(names)
    state = {
        name: {
            **run.scalars(),
            **{state: torch.empty(shape, device="meta") for state in run.states},
        }
        for name, shape in run.shapes.items()
    }
    return {"state": state, "param_groups": saved}


class _Planner(DefaultSavePlanner):  # type: ignore[misc]
    """Planner that reads each tensor from the checkpoint when it is written.

    torch's writer keeps all tensors of a file until it is complete. So the values of each are freed
    when the next is asked for: a writer without threads has written it by then.
    """

    def __init__(self, run: ExportedRun, progress: OnUnits) -> None:
        super().__init__()
        self._run, self._progress, self._done = run, progress, 0
        self._written = torch.empty(0)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, torch.Tensor) or not found.is_meta:
            return found
        name, state = index.fqn.removeprefix("model."), MASTER
        if index.fqn.startswith("optimizer.state."):
            name, _, state = index.fqn.removeprefix("optimizer.state.").rpartition(".")
        self._done += found.nbytes
        self._progress(self._done, self._run.num_bytes)
        self._written.untyped_storage().resize_(0)
        self._written = self._run.read(name, state)
        return self._written


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]
    """Writer whose metadata lists a tied weight under all its names, though it is stored once."""

    def __init__(self, folder: Path, tied: Mapping[str, Sequence[str]]) -> None:
        super().__init__(folder, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        self._tied = {f"model.{name}": others for name, others in tied.items()}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for listed in results for result in listed]
        for result in written:
            for other in self._tied.get(result.index.fqn, ()):
                key, index = f"model.{other}", result.index
                metadata.state_dict_metadata[key] = metadata.state_dict_metadata[index.fqn]
                metadata.planner_data[key] = ("model", other)
                alias = MetadataIndex(key, index.offset, index.index)
                results[0].append(replace(result, index=alias))
        super().finish(metadata, results)
