"""Records written by a user's own program: `from trainctl.records import log` in what `script=` or
`trainer=` starts.

A logged step is a line of the run's `events.jsonl`, in the format of trainctl's own trainer: it is
shown while the run goes on, drawn in the run report, and sent to the loggers of `logging.to`.
Neither torch nor DeepSpeed is imported.
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
"""Values that have a record field of their own; all others go into `values`."""

_KINDS = ("step", "evaluation")

_writers: dict[tuple[int, str, int], EventWriter] = {}
"""Open files by (process, run directory, attempt). A fork must not share its parent's file: both
would hold the same lock.
"""


def log(
    *,
    step: int,
    kind: Literal["step", "evaluation"] = "step",
    rank: int = 0,
    **values: Any,
) -> bool:
    """Record numbers of an optimizer step, or of an evaluation after it.

    Does nothing outside a run, nor on ranks other than `rank`. Errors of the run directory (a full
    disk) are warned of and never raised.

    Args:
        step: The optimizer step, from 1. Recording a step again, after a resume, replaces its
            record and discards all later ones.
        rank: The rank that records, by RANK; the others do nothing.
        values: Numbers by name, such as `loss=2.5`; also tensors and arrays of one element, and,
            for `seconds` and names of your own, mappings of names to numbers. `loss` becomes the
            metric `train/loss` or `evaluation/loss`, a name of your own `train/NAME`; `seconds` is
            the time of the whole step, or of its parts with a `total`.

    Returns:
        Whether the numbers were recorded.

    Raises:
        TypeError: A value is not a number.
        ValueError: `kind` is unknown, or the step is negative.
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
    """Convert a value to JSON data. NaN and infinities stay floats, which the writer spells out."""
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
