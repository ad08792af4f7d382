"""`job.json`: a scheduler's job of an attempt; written when the scheduler has accepted it."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_json
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import AttemptPaths

JOB_SCHEMA = 1
"""Version of `job.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerJob:
    """A scheduler's job that runs an attempt."""

    kind: str
    """The launcher: `slurm` or `kubernetes`."""
    id: str
    """The scheduler's job id, such as `4711` or `4711_3` (an array's task)."""
    submitted: float
    """Time of submission, in Unix seconds."""
    host: str
    """Machine that it was submitted from."""
    schema: int = JOB_SCHEMA


def write_job(attempt: AttemptPaths, job: SchedulerJob) -> None:
    """Record the job of an attempt."""
    write_json(attempt.job, to_plain(job))


def read_job(attempt: AttemptPaths) -> SchedulerJob | None:
    """Return the job of an attempt; None if no scheduler has it, or the file is damaged."""
    try:
        return from_plain(SchedulerJob, read_json(attempt.job))
    except (OSError, ValueError, TypeError):
        return None
