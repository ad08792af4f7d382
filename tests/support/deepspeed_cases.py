"""Checkpoints of plain DeepSpeed continued by trainctl, and back; compared with DeepSpeed alone.

Each case trains 3 steps with plain DeepSpeed and saves. The reference continues that checkpoint
with DeepSpeed to step 7. trainctl imports it, continues on another layout to step 5 and saves; what
it exports as universal is continued by plain DeepSpeed, at yet another stage, to step 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plain_deepspeed
from plain_deepspeed import Training
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases

from trainctl.migration.checkpoints.source import open_source
from trainctl.migration.checkpoints.to_universal import export
from trainctl.migration.checkpoints.write import import_source
from trainctl.plans.types import RunPlan
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths

SAVED, LEFT, LAST = 3, 5, 7
"""Steps after which DeepSpeed saves, trainctl saves, and all ends."""


@dataclass(frozen=True)
class Journey:
    """A training that begins with plain DeepSpeed and goes on in trainctl, then in DeepSpeed."""

    stage: int
    """ZeRO stage of the source."""
    processes: int
    """Number of the source's ranks."""
    target: str
    """Layout in trainctl, a key of `TARGETS`."""
    back: int
    """ZeRO stage in DeepSpeed afterwards, on two ranks."""
    axis: str = "data"
    """Axis of the source's ranks: `data`, `pipeline` (`PipelineModule`) or `tensor` (AutoTP)."""

    @property
    def name(self) -> str:
        return f"zero{self.stage}-{self.axis}{self.processes}-{self.target}-zero{self.back}"

    @property
    def model(self) -> Mapping[str, Any]:
        """Keys of the model; AutoTP cuts the output's weight and not the embedding's."""
        return {"model__tie_word_embeddings": self.axis != "tensor"}


GROUPS = {"two_groups": True}
"""Vectors are a parameter group of their own, without weight decay, as in trainctl."""

TARGETS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "1 process": (1, {"zero_stage__stage": 0}),
    "ZeRO 1": (2, {"zero_stage__stage": 1}),
    "ZeRO 2": (2, {"zero_stage__stage": 2}),
    "ZeRO 3": (2, {"zero_stage__stage": 3}),
    "tensor 2": (2, {"zero_stage__stage": 1, "parallelism__tensor": 2}),
    "pipeline 2": (2, {"zero_stage__stage": 1, "parallelism__pipeline": 2}),
    "FSDP2": (2, {"zero_stage__stage": 3, "engine__kind": "fsdp2"}),
}
"""Layouts by name: processes, and keys of the configuration."""

JOURNEYS = (
    Journey(1, 2, "ZeRO 3", 2),
    Journey(2, 2, "tensor 2", 3),
    Journey(3, 2, "pipeline 2", 1),
    Journey(1, 4, "tensor 2", 1),
    Journey(3, 4, "ZeRO 1", 3),
    Journey(1, 2, "1 process", 2, axis="pipeline"),
    Journey(1, 2, "FSDP2", 2, axis="tensor"),
)


@dataclass(frozen=True)
class Differences:
    """Largest differences of a journey's losses from those of DeepSpeed alone, in nats."""

    imported: float
    """Difference in trainctl, after the import."""
    returned: float
    """Difference in DeepSpeed, after the export."""


def differences(folder: Path, journeys: Sequence[Journey] = JOURNEYS) -> dict[Journey, Differences]:
    """Make the journeys and return their differences; journeys of a kind share their processes."""
    references = _train_sources(folder, journeys)
    _continue_imported(folder, journeys)
    returned = _continue_exported(folder, journeys)
    found = {}
    for journey in journeys:
        reference = references[journey]
        ours = {step: loss for step, (loss, _) in curve(_run(folder, journey)).items()}
        assert ours.keys() == set(range(SAVED + 1, LEFT + 1)), ours
        assert returned[journey].keys() == set(range(LEFT + 1, LAST + 1)), returned[journey]
        found[journey] = Differences(
            _largest(ours, reference), _largest(returned[journey], reference)
        )
    return found


def _largest(losses: Mapping[int, float], reference: Mapping[int, float]) -> float:
    return max(abs(loss - reference[step]) for step, loss in losses.items())


def _plan(processes: int, **keys: Any) -> RunPlan:
    config = tiny_config(
        **{
            "steps": 20,
            "evaluation_samples": 0,
            "optimizer__lr": 1e-3,
            "optimizer__decay_embeddings": True,
            "schedule__kind": "constant",
            **keys,
        }
    )
    return tiny_plan(config, processes)


def _run(folder: Path, journey: Journey) -> RunPaths:
    return RunPaths(folder / journey.name / "run")


def saved_by_deepspeed(folder: Path, journey: Journey) -> Path:
    """Return the directory that plain DeepSpeed saves in."""
    return folder / journey.name / "deepspeed"


def _train_sources(folder: Path, journeys: Iterable[Journey]) -> dict[Journey, dict[int, float]]:
    """Train the sources and continue them with DeepSpeed; return the losses of the latter."""
    found: dict[Journey, dict[int, float]] = {}
    by_size: dict[int, list[Journey]] = {}
    for journey in journeys:
        by_size.setdefault(journey.processes, []).append(journey)
    for processes, listed in by_size.items():
        trainings = []
        for journey in listed:
            is_cut, at = journey.axis != "data", saved_by_deepspeed(folder, journey)
            keys = {f"parallelism__{journey.axis}": processes} if is_cut else {}
            plan = _plan(processes, **journey.model, **keys)
            case = Case(plan, RunPaths(folder / journey.name / "data"))
            kind: dict[str, Any] = {"pipeline": journey.axis == "pipeline", **GROUPS}
            if journey.axis == "tensor":
                kind["settings"] = {"tensor_parallel": {"autotp_size": processes}}
            trainings.append(Training(case, journey.stage, SAVED, save=at, **kind))
            trainings.append(Training(case, journey.stage, LAST, load=at, **kind))
        curves = plain_deepspeed.train(processes, trainings)
        found |= dict(zip(listed, curves[1::2], strict=True))
    return found


def _continue_imported(folder: Path, journeys: Iterable[Journey]) -> None:
    """Import the sources and continue them in trainctl."""
    by_size: dict[int, list[Case]] = {}
    for journey in journeys:
        processes, keys = TARGETS[journey.target]
        plan = _plan(processes, stop_after_steps=LEFT, **journey.model, **keys)
        run = _run(folder, journey)
        import_source(open_source(saved_by_deepspeed(folder, journey)), plan, run.root)
        by_size.setdefault(processes, []).append(Case(plan, run))
    for processes, cases in by_size.items():
        train_cases(processes, cases, together=True)


def _continue_exported(
    folder: Path, journeys: Sequence[Journey]
) -> dict[Journey, dict[int, float]]:
    """Export what trainctl saved, and continue it with plain DeepSpeed; return the losses."""
    trainings = []
    for journey in journeys:
        case = Case(_plan(2, **journey.model), RunPaths(folder / journey.name / "data"))
        newest = checkpoints.list_checkpoints(_run(folder, journey))[-1]
        out = folder / journey.name / "universal"
        export(case.plan.config, newest.path, out)
        trainings.append(Training(case, journey.back, LAST, load=out, universal=True, **GROUPS))
    return dict(zip(journeys, plain_deepspeed.train(2, trainings), strict=True))
