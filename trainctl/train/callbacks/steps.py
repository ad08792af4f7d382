"""Records of steps: speed, memory beside the planned one, divergence of the loss; and heartbeats.

Formula and peak rates of the speed are in `trainctl.plans.flops` and `conf/hardware/`;
`docs/throughput.md` explains the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from trainctl.config.schema import Accelerator, DataType
from trainctl.engines.process import Process
from trainctl.engines.stopwatch import PhaseMemory, peak_resident_bytes
from trainctl.memory.budget import MemoryBudget, budget
from trainctl.memory.traced import known_traced_model
from trainctl.options.callbacks import Callback, Context
from trainctl.options.objective.grpo import answers_per_prompt
from trainctl.plans.flops import flops_of_run, utilisation
from trainctl.plans.types import Batch, RunPlan
from trainctl.runs.records import round_measured
from trainctl.runs.status import Phase
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.session import Session


class Heartbeats(Callback):
    """Tells the agent after each step that this rank works."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def after_step(self, context: Context) -> None:
        self._journal.beat(Phase.step)

    def on_train_end(self, context: Context) -> None:
        self._journal.beat(Phase.end)


class Throughput:
    """Training speed of a plan's steps."""

    def __init__(self, plan: RunPlan) -> None:
        self._config = plan.config
        self._devices = plan.mesh.world_size
        compute = plan.config.precision.compute
        # If TF32 was enabled from outside, matrix products do not use the planned format.
        is_tf32 = compute == DataType.fp32 and torch.backends.cuda.matmul.allow_tf32
        self._peak = None if is_tf32 else plan.hardware.peak_tflops(compute)

    def of_step(self, seconds: float, batch: Batch) -> dict[str, float | None]:
        """Return `tokens_per_second` of all devices and `mfu`, the model FLOPs utilization.

        Args:
            seconds: Length of an optimizer step.
            batch: Global batch of the step, its sequences as long as the rows that ran.

        Returns:
            `mfu` is None if the peak rate of the device and format is unknown.
        """
        tokens = batch.tokens_per_step
        flops = tokens * flops_of_run(self._config, batch.sequence_length)
        used = utilisation(flops, seconds, devices=self._devices, peak_tflops=self._peak)
        return {
            "tokens_per_second": round_measured(tokens / seconds),
            "mfu": None if used is None else round_measured(used),
        }


class StepRecords(Callback):
    """Records each step that counts."""

    def __init__(self, session: Session, now: StepState, journal: Journal) -> None:
        self._session, self._now, self._journal = session, now, journal
        self._throughput = Throughput(session.plan)

    def after_step(self, context: Context) -> None:
        session, step = self._session, self._now.made
        assert step is not None
        batch, rollouts = step.batch, session.rollouts
        if rollouts is not None:
            batch = replace(batch, sequence_length=rollouts.width)
        self._journal.record(
            "step",
            step=context.step,
            loss=step.loss,
            learning_rate=context.learning_rate,
            learning_rates=session.engine.learning_rates(),
            grad_norm=step.grad_norm,
            **step.extras(),
            **self._precision(),
            tokens=context.tokens,
            **self._throughput.of_step(self._now.step_seconds, batch),
            seconds=context.seconds,
            peak_bytes=peak_bytes(session.process.device, session.engine.times.memory),
            samples=[step.first_sample, session.progress.samples],
            **self._sources(),
        )
        for fields in self._now.early_records:
            self._journal.record("callback", **fields)
        self._now.early_records.clear()

    def _sources(self) -> dict[str, object]:
        """Return the step's samples per source; empty without `data.sources`."""
        session, step = self._session, self._now.made
        if step is None or not session.plan.config.data.sources:
            return {}
        end = step.first_sample + step.batch.global_batch_size
        answers = answers_per_prompt(session.plan.config.objective)
        drawn = session.training.source_draws(step.first_sample // answers, end // answers)
        return {"sources": {name: count * answers for name, count in drawn.items()}}

    def _precision(self) -> dict[str, object]:
        """Return whether the last update was skipped, and the next step's fp16 loss scale."""
        engine, step = self._session.engine, self._now.made
        skipped = engine.was_skipped or (step is not None and step.intervention is not None)
        found: dict[str, object] = {"skipped": True} if skipped else {}
        if engine.loss_scale is not None:
            found["loss_scale"] = engine.loss_scale.value
        return found


STEADY_AFTER_STEPS = 2
"""Steps until memory is compared: the first allocates what stays, the second has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Peak memory of a process since it started, in bytes."""

    device_peak_bytes: int
    """Device memory in use: tensors, driver context, communication library. The plan's budget
    predicts it under the same name. On a CPU, the resident memory of the process.
    """
    allocated_peak_bytes: int | None
    """Device memory in tensors; None on a CPU."""
    reserved_peak_bytes: int | None
    """Device memory held by torch's caching allocator; None on a CPU."""
    host_peak_bytes: int
    """Resident memory of the process."""


def peak_memory(device: torch.device) -> PeakMemory:
    """Return the peak memory of this process so far.

    Memory outside the allocator is what the driver counts as used beyond it, so another process on
    the same device is counted too.
    """
    device_peak = host = peak_resident_bytes()
    allocated = reserved = None
    if device.type != "cpu":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        device_peak = allocated + max(0, total - free - torch.cuda.memory_reserved(device))
    return PeakMemory(
        device_peak_bytes=device_peak,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=reserved,
        host_peak_bytes=host,
    )


def peak_bytes(device: torch.device, phases: PhaseMemory | None = None) -> dict[str, int | None]:
    """Return the peaks of this process that cost next to nothing to read, for every step's record.

    `allocated` is the memory of tensors on the device (None on a CPU), `host` the resident memory.
    Peaks are since the start. With `phases`, the memory that it measures (of tensors, or on a CPU
    of the process) has its peak since the last record.
    """
    if device.type == "cpu":
        return {"allocated": None, "host": phases.take() if phases else peak_resident_bytes()}
    allocated = phases.take() if phases else torch.cuda.max_memory_allocated(device)
    return {"allocated": allocated, "host": peak_resident_bytes()}


def memory_record(
    plan: RunPlan, process: Process, phases: PhaseMemory | None = None
) -> dict[str, Any]:
    """Return the fullest rank's peaks beside the planned ones, if known; on all ranks together.

    Args:
        phases: Peaks of each part of a step, if measured; the planned ones are then added.
    """
    peaks = _overall_peak(peak_memory(process.device), phases)
    ranks = [asdict(peak) for peak in process.gather(peaks)]
    measured = {
        name: None if first is None else max(peak[name] for peak in ranks)
        for name, first in ranks[0].items()
    }
    traced = known_traced_model(plan.config)
    is_known = traced is not None or not plan.config.model.needs_trace
    planned = budget(plan, traced) if is_known else None  # a rank does not trace
    beside = host_bytes_in_device_peak(plan, planned) if planned else 0
    record: dict[str, Any] = {
        "measured": measured,
        "planned": planned
        and {
            "device_peak_bytes": planned.device_peak_bytes + beside,
            "device_peak_low_bytes": planned.device_peak_low_bytes + beside,
            "device_peak_high_bytes": planned.device_peak_high_bytes + beside,
            "allocated_peak_bytes": planned.components.allocated,
            "reserved_peak_bytes": planned.device_reserved_bytes,
        },
    }
    if phases is not None:
        every = process.gather(phases.peaks)
        record["phases"] = {
            "measured": {name: max(peaks[name] for peaks in every) for name in phases.peaks},
            "planned": {
                name: {"device_bytes": moment.total, "allocated_bytes": moment.allocated}
                for name, moment in (planned.worst_stage.moments.items() if planned else ())
            },
        }
    return record


def host_bytes_in_device_peak(plan: RunPlan, planned: MemoryBudget) -> int:
    """Return a rank's bytes that the budget counts as host memory but its device peak contains.

    On a CPU these are the offloaded tensors and NVMe buffers, resident in the same process. On a
    GPU they are 0: the GPU's own memory is measured.
    """
    if plan.hardware.accelerator is not Accelerator.cpu:
        return 0
    host = planned.host
    return (host.bytes_per_node - host.components["processes"]) // plan.hardware.devices_per_node


def _overall_peak(peak: PeakMemory, phases: PhaseMemory | None) -> PeakMemory:
    """Return the peak since the start; `phases` restarts the measured peak at each part."""
    if phases is None:
        return peak
    highest = phases.highest
    if peak.allocated_peak_bytes is None:
        resident = max(peak.host_peak_bytes, highest)
        return replace(peak, device_peak_bytes=resident, host_peak_bytes=resident)
    outside = peak.device_peak_bytes - peak.allocated_peak_bytes
    allocated = max(peak.allocated_peak_bytes, highest)
    return replace(peak, allocated_peak_bytes=allocated, device_peak_bytes=allocated + outside)


class MemoryRecords(Callback):
    """Records the fullest rank's peak memory after the first steps and at the end."""

    def __init__(self, session: Session, journal: Journal) -> None:
        self._session, self._journal = session, journal
        self._steady = session.progress.step + STEADY_AFTER_STEPS

    def after_step(self, context: Context) -> None:
        if context.step == self._steady:
            self._record(context.step, at_end=False)

    def on_train_end(self, context: Context) -> None:
        self._record(context.step, at_end=True)

    def _record(self, step: int, *, at_end: bool) -> None:
        session = self._session
        record = memory_record(session.plan, session.process, session.engine.times.memory)
        self._journal.record("memory", step=step, at_end=at_end, **record)


DIVERGED_STEPS = 10
"""Steps in a row that must agree: a spike is shorter, or comes down in between."""
UNIFORM_LOSS_FACTOR = 1.5
"""Limit, as a multiple of ln(vocabulary): the loss of uniform predictions, near fresh weights'."""
ABOVE_FIRST = 1.1
"""Limit, as a multiple of ln(vocabulary), or of the first step's loss if that is higher: a model
whose loss stays above it and falls no more has become worse than it began.
"""
FALLING = 0.95
"""Fraction of the mean of the last steps below which a loss is coming down, as after a spike."""
ABOVE_BEST = 2.0
"""Limit, as a multiple of the run's lowest mean loss over `DIVERGED_STEPS` steps."""
LEAST_SHARE = 0.5
"""Least limit, as a multiple of ln(vocabulary).

A small loss may double on harder text; a model that has unlearnt everything but token frequencies
is above half.
"""
ABOVE_START = 3.0
"""Limit, as a multiple of the mean loss of the first steps, for losses other than cross entropy."""


class Divergence:
    """Detector of a loss that stays far above what the run had reached. It only reports.

    The loss has diverged once each of the last `DIVERGED_STEPS` steps is above the limit, and has
    recovered once each is below it. The limit of a cross entropy is `UNIFORM_LOSS_FACTOR` times
    ln(vocabulary), `ABOVE_FIRST` times the same or the first loss for a loss that falls no more, or
    `ABOVE_BEST` times the run's best loss if that is lower, but at least `LEAST_SHARE` of
    ln(vocabulary). Other objectives have their own units: their limit is `ABOVE_START` times the
    loss of the first steps, or none if that is not positive.

    Args:
        vocab_size: Number of token ids that the model scores, for a cross entropy; None for others.
    """

    def __init__(self, vocab_size: int | None) -> None:
        self._ignorance = None if vocab_size is None else math.log(vocab_size)
        self._recent: deque[float] = deque(maxlen=DIVERGED_STEPS)
        self._first, self._best, self._start = math.inf, math.inf, math.inf
        self._has_diverged = False

    def see(self, loss: float, step: int) -> dict[str, Any] | None:
        """Add the loss of a step; return the fields of the record if the verdict changes."""
        self._recent.append(loss)
        if math.isinf(self._first) and math.isinf(self._start):
            self._first = loss
        if len(self._recent) < DIVERGED_STEPS:
            return None
        mean = math.fsum(self._recent) / DIVERGED_STEPS
        self._best = min(self._best, mean)
        if math.isinf(self._start):
            self._start = mean
        times, reference, value = self._limit()
        limit = times * value
        deciding = max(self._recent) if self._has_diverged else min(self._recent)
        is_over = deciding > limit
        if times == ABOVE_FIRST and not self._has_diverged and loss < FALLING * mean:
            return None  # it may come down by itself
        if is_over == self._has_diverged:
            return None
        self._has_diverged = is_over
        return {
            "diverged": is_over,
            "step": step,
            "loss": mean,
            "limit": limit,
            "times": times,
            "reference": reference,
        }

    def _limit(self) -> tuple[float, str, float]:
        """Return the limit as a factor, and the name and value of the reference it multiplies."""
        if self._ignorance is None:
            return ABOVE_START, "start", self._start if self._start > 0 else math.inf
        limits = (
            (ABOVE_BEST, "best", self._best),
            (LEAST_SHARE, "vocabulary", self._ignorance),
        )
        of_run = max(limits, key=lambda each: each[0] * each[2])
        ceiling = (UNIFORM_LOSS_FACTOR, "vocabulary", self._ignorance)
        began = max(("vocabulary", self._ignorance), ("first", self._first), key=itemgetter(1))
        fresh = (ABOVE_FIRST, *began)
        return min(ceiling, of_run, fresh, key=lambda each: each[0] * each[2])

    def state(self) -> dict[str, float]:
        """Return what `restore` needs; empty before `DIVERGED_STEPS` steps."""
        if math.isinf(self._best):
            return {}
        return {"first": self._first, "best": self._best, "start": self._start}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint. Each attempt reports a divergence anew."""
        self._recent.clear()
        self._first = float(state.get("first", math.inf))
        self._best = float(state.get("best", math.inf))
        self._start = float(state.get("start", math.inf))


class DivergenceRecords(Callback):
    """Records when the loss diverges and when it recovers."""

    def __init__(self, divergence: Divergence, now: StepState, journal: Journal) -> None:
        self._divergence, self._now, self._journal = divergence, now, journal

    def after_step(self, context: Context) -> None:
        step = self._now.made
        assert step is not None
        if step.intervention is None:
            verdict = self._divergence.see(step.loss, context.step)
            if verdict is not None:
                rate = context.learning_rate
                self._journal.record("divergence", learning_rate=rate, **verdict)

    def before_save(self) -> Mapping[str, Any]:
        return self._divergence.state()

    def after_load(self, state: Mapping[str, Any]) -> None:
        self._divergence.restore(state)
