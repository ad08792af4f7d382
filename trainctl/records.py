"""Records of a program's own: `from trainctl.records import log` in what `script=` or `trainer=`
starts.

A step that is logged is a line of the run's `events.jsonl`, as trainctl's own trainer writes it: it
is shown while the run goes on, drawn by its pages, and sent to the loggers of `logging.to`. Neither
torch nor DeepSpeed is imported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter

RUN_VARIABLE, ATTEMPT_VARIABLE = "TRAINCTL_RUN_DIR", "TRAINCTL_ATTEMPT"

FIELDS = (
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "mfu",
    "seconds",
)
"""Values that records have fields for; others go into `values`."""

_KINDS = ("step", "evaluation")

_writers: dict[tuple[int, str, int], EventWriter] = {}
"""Open files, by process: a lock on a file that a fork shares would keep nobody out."""


def log(
    *,
    step: int,
    kind: Literal["step", "evaluation"] = "step",
    rank: int = 0,
    **values: Any,
) -> bool:
    """Record numbers of an optimizer step, or of an evaluation after it.

    Outside a run, and on other ranks than that one, it does nothing; nor does it ever raise for
    what the run directory does (a full disk).

    Args:
        step: The optimizer step, from 1. One that is recorded again, after a resume, takes the
            place of that step and of all behind it.
        kind: What they are of.
        rank: The rank that records, by RANK; the others do nothing.
        values: Numbers by name, such as `loss=2.5`; also tensors and arrays of one element, and,
            of `seconds` and names of your own, mappings of names to numbers. `loss` becomes the
            metric `train/loss` or `evaluation/loss`, a name of your own `train/NAME`; `seconds` is
            the time of the whole step, or of its parts with a `total`.

    Returns:
        Whether it was recorded.

    Raises:
        TypeError: A value is no number.
        ValueError: There is no such kind, or the step is negative.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} is neither of {', '.join(_KINDS)}")
    if step < 0:
        raise ValueError(f"there is no step {step}")
    folder, attempt = os.environ.get(RUN_VARIABLE), os.environ.get(ATTEMPT_VARIABLE)
    if not folder or not attempt:
        return False
    if os.environ.get("RANK", "0") != str(rank):
        return False
    known = {name: _plain(value) for name, value in values.items()}
    if isinstance(known.get("seconds"), int | float):
        known["seconds"] = {"total": known["seconds"]}
    for name in FIELDS:
        if name != "seconds" and isinstance(known.get(name), dict):
            raise TypeError(f"{name} is one number; log several under a name of your own")
    own = {name: known.pop(name) for name in list(known) if name not in FIELDS}
    if own:
        known["values"] = own
    try:
        _writer(folder, int(attempt)).write(kind, step=int(step), **known)
    except OSError as error:
        warnings.warn(f"trainctl.records.log: {error}", stacklevel=2)
        return False
    return True


def _writer(folder: str, attempt: int) -> EventWriter:
    which = (os.getpid(), folder, attempt)
    if which not in _writers:
        _writers[which] = EventWriter(RunPaths(Path(folder)).events, attempt)
    return _writers[which]


def _plain(value: Any) -> Any:
    """It as JSON takes it; NaN and infinities as floats, which the writer spells."""
    if isinstance(value, bool):
        raise TypeError("a value is a number, and this is True or False")
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    try:
        return float(value)
    except (ValueError, RuntimeError):
        raise TypeError(f"a value is a number, and this is {value!r}") from None
