"""Records of steps, with their speed, and heartbeats.

Formula and peak rates of the speed are in `trainctl.plan.flops` and `conf/hardware/`;
`docs/throughput.md` explains the figures.
"""

from __future__ import annotations

import torch

from trainctl.config.schema import DataType
from trainctl.options.callbacks import Callback, Context
from trainctl.plan.flops import flops_of_run, utilisation
from trainctl.plan.types import Batch, RunPlan
from trainctl.runs.records import short
from trainctl.runs.status import Phase
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.callbacks.memory import peak_bytes
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
            batch: Global batch of the step.

        Returns:
            `mfu` is None if the peak rate of the device and format is unknown.
        """
        tokens = batch.tokens_per_step
        flops = tokens * flops_of_run(self._config, batch.sequence_length)
        used = utilisation(flops, seconds, devices=self._devices, peak_tflops=self._peak)
        return {
            "tokens_per_second": short(tokens / seconds),
            "mfu": None if used is None else short(used),
        }


class StepRecords(Callback):
    """Records each step that counts."""

    def __init__(self, session: Session, now: StepState, journal: Journal) -> None:
        self._session, self._now, self._journal = session, now, journal
        self._throughput = Throughput(session.plan)

    def after_step(self, context: Context) -> None:
        session, step = self._session, self._now.made
        assert step is not None
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
            **self._throughput.of_step(self._now.step_seconds, step.batch),
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
        return {"sources": session.training.source_draws(step.first_sample, end)}

    def _precision(self) -> dict[str, object]:
        """Return whether the last update was skipped, and the next step's fp16 loss scale."""
        engine, step = self._session.engine, self._now.made
        skipped = engine.was_skipped or (step is not None and step.intervention is not None)
        found: dict[str, object] = {"skipped": True} if skipped else {}
        if engine.loss_scale is not None:
            found["loss_scale"] = engine.loss_scale.value
        return found
