"""A run's checkpoint with its optimizer, in the terms of torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import RunConfig
from trainctl.errors import RunStateError, TrainctlError
from trainctl.options.optimizer import Maker, spec_of
from trainctl.plans.deepspeed import optimizer_parameter
from trainctl.plans.mup import multipliers
from trainctl.plans.schedule import Curve
from trainctl.plans.trainable import is_partial
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.export.output import ExportedCheckpoint
from trainctl.train.models.model import skeleton

PIECE = 1 << 22
"""Elements that are copied at a time: 16 MiB in fp32."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are written and their total."""


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
