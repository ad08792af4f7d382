"""Answers that a run has learned from, as text: one file of JSON lines for each step.

`RUN/rollouts/step-00000040.jsonl.gz` has the first answers of step 40 in the order of the batch:

| field | what it is |
|---|---|
| `step` | optimizer step, from 1 |
| `number`, `sample` | number of the prompt in the run's order, and of the answer to it |
| `prompt`, `answer` | texts, with secrets redacted |
| `tokens`, `is_finished` | tokens of the answer; false if it was cut |
| `rewards` | reward by name; null where it does not apply or has failed |
| `failed` | names of the rewards that have failed |
| `reward` | their weighted sum; null if none applies, or all that apply have failed |
| `advantage` | what the answer's log-probability is raised by |
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from trainctl.config.reading import read_bytes
from trainctl.config.secrets import redact_text
from trainctl.errors import RunStateError, TrainctlError
from trainctl.runs.files import ensure_folder, write_bytes
from trainctl.runs.layout import RunPaths

Rollout = dict[str, Any]

_MOST_BYTES = 1 << 28
"""Limit of a file's content: a damaged one may say that it has any size."""
_NAME = re.compile(r"step-(\d{8,})\.jsonl\.gz")


def rollouts_file(run: RunPaths, step: int) -> Path:
    """Return the path of the answers of a step."""
    return run.rollouts / f"step-{step:08d}.jsonl.gz"


def write_rollouts(run: RunPaths, step: int, answers: Sequence[Rollout]) -> None:
    """Write the answers of a step atomically; a repeated step replaces them."""
    ensure_folder(run.rollouts)
    lines = [json.dumps(_clean({**each, "step": step}), allow_nan=False) for each in answers]
    raw = gzip.compress("".join(f"{line}\n" for line in lines).encode(), 6, mtime=0)
    write_bytes(rollouts_file(run, step), raw)


def _clean(answer: Rollout) -> Rollout:
    texts = {name: redact_text(answer[name]) for name in ("prompt", "answer")}
    numbers = {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in ((name, answer[name]) for name in ("reward", "advantage"))
    }
    failed = answer.get("failed", ())
    rewards = {n: None if n in failed else value for n, value in answer["rewards"].items()}
    return {**answer, **texts, **numbers, "rewards": rewards}


def reward_texts(answer: Rollout) -> dict[str, str]:
    """Return the rewards of an answer as text, by name."""
    failed = answer.get("failed", ())
    return {
        name: "failed" if name in failed else "none" if value is None else f"{value:.4g}"
        for name, value in answer["rewards"].items()
    }


def rollout_steps(run: RunPaths) -> list[int]:
    """Return the steps whose answers the run has kept, ascending."""
    found = (_NAME.fullmatch(path.name) for path in run.rollouts.glob("step-*.jsonl.gz"))
    return sorted(int(match[1]) for match in found if match)


def read_rollouts(run: RunPaths, step: int) -> list[Rollout]:
    """Return the kept answers of a step.

    Raises:
        TrainctlError: There are none, or the file is damaged (exit code 5).
    """
    path = rollouts_file(run, step)
    steps = rollout_steps(run)
    if step not in steps:
        kept = f"steps {steps[0]:,} to {steps[-1]:,}" if steps else "none"
        raise RunStateError(
            f"{run.root} has no answers of step {step:,}: kept are those of {kept}",
            hint="objective.keep_rollouts says how many answers of a step are kept",
        )
    try:
        with gzip.GzipFile(fileobj=BytesIO(read_bytes(path))) as stream:
            return [json.loads(line) for line in stream.read(_MOST_BYTES).splitlines()]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise RunStateError(
            f"{path} cannot be read: {error}", hint="remove it: no later step needs it"
        ) from None


def newest_rollouts(run: RunPaths, most: int) -> Iterator[Rollout]:
    """Yield up to `most` answers, those of the newest steps first; damaged files are left out."""
    for step in reversed(rollout_steps(run)):
        if most <= 0:
            return
        with suppress(TrainctlError):
            found = read_rollouts(run, step)[:most]
            yield from found
            most -= len(found)
