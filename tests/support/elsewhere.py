"""Runs that move between layouts: other process counts, ZeRO stages, offload on and off.

A journey is one run in several legs, each on one layout. Every leg except the last runs two steps
beyond its last checkpoint, so that the next leg replays them and its first losses can be compared.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plain_order import sample_indices
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.registry import new_section
from trainctl.config.schema import DataType, OffloadDevice, PipelineSchedule
from trainctl.data.corpus import Corpus
from trainctl.options.model import AXES
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

SAVE_EVERY, OVERSHOOT, STEPS = 3, 2, 9

PROCESSES = ((2, 1), (1, 2), (2, 4), (4, 2))
STAGES = ((1, 3), (3, 1), (3, 2), (2, 0), (0, 3))


@dataclass(frozen=True, order=True)
class Leg:
    """Layout of a leg; processes not used by the other axes are data-parallel."""

    processes: int
    stage: int
    offload: str = "none"
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    context: int = 1
    shard_group: int = 0
    """Ranks of an HSDP shard group of `engine=fsdp2`; 0 is DeepSpeed."""
    folded: int = 0
    """Stages on each rank under DualPipeV; 0 is 1F1B."""

    @property
    def cut(self) -> str:
        """Return the axes other than data."""
        sizes = {name: getattr(self, name) for name in (*AXES, "shard_group", "folded")}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "none"

    @property
    def name(self) -> str:
        cut = self.cut.replace(" ", "")
        return f"{self.processes}p-zero{self.stage}-{self.offload}-{cut}"

    def plan(self) -> RunPlan:
        config = tiny_config(steps=STEPS, model__num_layers=4)
        config.precision.compute = DataType.fp32
        config.optimizer.lr = 1e-3
        config.schedule.warmup_steps = 2
        config.zero_stage.stage = self.stage
        if self.shard_group:
            config.engine = new_section("engine", "fsdp2")
            config.zero_stage.shard_group_size = self.shard_group
        if self.folded:
            config.parallelism.pipeline_schedule = PipelineSchedule.dualpipev
            config.training.gradient_accumulation_steps = self.folded * self.pipeline
        config.offload.optimizer = OffloadDevice(self.offload)
        for axis in AXES:
            setattr(config.parallelism, axis, getattr(self, axis))
        config.checkpoint.every_steps = SAVE_EVERY
        config.checkpoint.at_end = False
        return tiny_plan(config, self.processes)


Journey = tuple[Leg, ...]

REFERENCE: Journey = (Leg(1, 0),)
"""Reference: undisturbed, on one process and without ZeRO."""


_WHOLE, _ALL = Leg(2, 2), Leg(8, 1, tensor=2, pipeline=2)
_TENSOR, _PIPELINE = Leg(2, 3, tensor=2), Leg(2, 1, pipeline=2)
CUTS: tuple[Journey, ...] = (
    (_TENSOR, _WHOLE, _TENSOR),
    (_PIPELINE, _WHOLE, _PIPELINE),
    (Leg(2, 1, pipeline=2, folded=2), _PIPELINE, Leg(2, 1, pipeline=2, folded=2)),
    (_ALL, _WHOLE, _ALL),
    (Leg(2, 1, sequence=2), Leg(2, 0, tensor=2), Leg(2, 0, pipeline=2)),
    (Leg(4, 1, context=4), Leg(4, 3, sequence=2, context=2), Leg(2, 2, context=2)),
)
"""Journeys that change the model-parallel axes."""


def plain(processes: tuple[int, int], stages: tuple[int, int]) -> Journey:
    """Return the journeys from one layout to another."""
    return tuple(Leg(*leg) for leg in zip(processes, stages, strict=True))


def offloaded(processes: tuple[int, int], stages: tuple[int, int]) -> Journey:
    """Return the journeys with the optimizer in host memory on the way; ZeRO 0 has no offload."""
    start, end = plain(processes, stages)
    host = end if end.stage > 0 else Leg(end.processes, start.stage)
    return start, Leg(host.processes, host.stage, "cpu"), end


def travel(folder: Path, journeys: Iterable[Journey]) -> dict[Journey, RunPaths]:
    """Run the journeys; a common beginning is run once."""
    wanted = [REFERENCE, *journeys]
    for length in range(1, 1 + max(map(len, wanted))):
        ending = {journey for journey in wanted if len(journey) == length}
        leaving = {journey[:length] for journey in wanted if len(journey) > length}
        cases: dict[tuple[int, bool], list[Case]] = {}
        for goes_on, begun in ((False, ending), (True, leaving)):
            for part in sorted(begun):
                run = _place(folder, part, goes_on)
                if length > 1:
                    shutil.copytree(_place(folder, part[:-1], True).root, run.root)
                stop, leg = length * SAVE_EVERY + OVERSHOOT if goes_on else STEPS, part[-1]
                case = Case(with_stop(leg.plan(), stop), run, attempt=length)
                cases.setdefault((leg.processes, leg.offload == "none"), []).append(case)
        for (processes, together), some in cases.items():
            train_cases(processes, some, together=together)
    return {journey: _place(folder, journey, False) for journey in wanted}


def _place(folder: Path, journey: Journey, goes_on: bool) -> RunPaths:
    name = "_".join(leg.name for leg in journey)
    return RunPaths(folder / (f"{name}_on" if goes_on else name))


def largest_difference(run: RunPaths, reference: RunPaths) -> float:
    """Return the largest difference of a loss from the undisturbed curve, in nats."""
    expected, actual = curve(reference), curve(run)
    assert list(actual) == list(expected) == list(range(1, STEPS + 1))
    return max(abs(actual[step][0] - loss) for step, (loss, _) in expected.items())


def replayed_steps(run: RunPaths) -> int:
    """Return the steps whose loss was compared with that of the previous leg."""
    return sum(event["event"] == "replay" for event in read_events(run.events))


def sees_every_sample_once(run: RunPaths, plan: RunPlan) -> bool:
    """Return True if the ranks really read each sample of the run's order once.

    Samples beyond a leg's last checkpoint do not count: the weights never saw them.
    """
    seen: dict[int, list[int]] = {}
    for file in sorted(run.root.glob("seen-*.jsonl"), key=lambda path: int(path.stem[5:])):
        of_attempt: dict[int, list[int]] = defaultdict(list)
        for line in file.read_text().splitlines():
            record = json.loads(line)
            of_attempt[record["first"]] += record["ids"]
        seen |= of_attempt
    corpus = Corpus.load(run.corpus)
    size = plan.batch.global_batch_size
    counters = np.arange(STEPS * size, dtype=np.int64)
    order = sample_indices(
        counters,
        num_samples=(corpus.train.tokens - 1) // plan.batch.sequence_length,
        seed=plan.config.training.seed,
        shuffle=plan.config.data.shuffle,
    )
    expected = {
        step * size: sorted(order[step * size : (step + 1) * size].tolist())
        for step in range(STEPS)
    }
    return {first: sorted(ids) for first, ids in seen.items()} == expected
