"""The step that a run resumes from, and the steps that are lost."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import last_step


@dataclass(frozen=True, slots=True)
class GoingOn:
    """Starting point of the next attempt."""

    step: int
    """Optimizer step of the newest complete checkpoint; 0 is the beginning."""
    lost: int
    """Steps made after it, which have to be repeated."""

    @classmethod
    def of(cls, run: RunPaths) -> GoingOn:
        """Find it from the run's checkpoints and the end of its records."""
        checkpoint, _ = newest_checkpoint(run)
        step = checkpoint.step if checkpoint is not None else 0
        return cls(step, max(0, last_step(run) - step))

    def sentence(self, run: RunPaths) -> str:
        """Return a sentence: ``trainctl resume a continues from step 40: 3 steps are lost``."""
        how = f"continues from step {self.step:,}" if self.step else "starts from the beginning"
        lost = f"{self.lost:,} steps are" if self.lost > 1 else f"{('no', '1')[self.lost]} step is"
        return f"trainctl resume {run.root} {how}: {lost} lost"
