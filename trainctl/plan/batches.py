"""Batch sizes over the run: constant, or with a ramp of smaller ones first (`training.batch_ramp`).

Everything here is a function of the step alone, so it is the same on every rank and layout, and
after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Batch sizes, with global = micro x accumulation x data, in sequences."""

    global_batch_size: int
    """Sequences in an optimizer step."""
    micro_batch_size: int
    """Sequences in one forward pass of a data-parallel rank."""
    gradient_accumulation_steps: int
    """Forward passes in an optimizer step."""
    sequence_length: int
    """Tokens in a sequence."""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPhase:
    """Range of steps with the same batch size."""

    first_step: int
    """First step of the range, from 0."""
    batch: Batch
    """Batch of each step in the range."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Batch of every step of a run."""

    phases: tuple[BatchPhase, ...]
    """Phases ascending by their first step, from 0; the last one has no end."""

    @classmethod
    def of(cls, ramp: tuple[BatchPhase, ...], batch: Batch) -> Batches:
        """Return the batches of a ramp that ends in `batch`; without a ramp all steps have it."""
        return cls(ramp or (BatchPhase(first_step=0, batch=batch),))

    def at(self, step: int) -> Batch:
        """Return the batch of update number `step`, from 0."""
        return next(phase.batch for phase in reversed(self.phases) if phase.first_step <= step)

    def samples_before(self, step: int) -> int:
        """Return the number of sequences in all updates before number `step`."""
        return sum(count * batch.global_batch_size for count, batch in self._until(step))

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens in all updates before number `step`."""
        return sum(count * batch.tokens_per_step for count, batch in self._until(step))

    def steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps from the start with at least `tokens` tokens."""
        last = self.phases[-1]
        for phase, following in zip(self.phases, self.phases[1:], strict=False):
            if self.tokens_before(following.first_step) >= tokens:
                last = phase
                break
        missing = max(0, tokens - self.tokens_before(last.first_step))
        return last.first_step + -(-missing // last.batch.tokens_per_step)

    def _until(self, step: int) -> list[tuple[int, Batch]]:
        """Return for each phase the number of its updates before number `step`, with its batch."""
        ends = [phase.first_step for phase in self.phases[1:]] + [step]
        return [
            (max(0, min(end, step) - phase.first_step), phase.batch)
            for phase, end in zip(self.phases, ends, strict=True)
        ]
