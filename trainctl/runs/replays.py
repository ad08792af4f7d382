"""Requests to the ranks of a replay: a file of settings in the replay's directory.

A run's own plan has no such file, so no run records or repeats anything by mistake.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, TypeVar

from trainctl.config.reading import read_json
from trainctl.runs.files import ensure_folder, write_json
from trainctl.runs.layout import RunPaths


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """Recording of every step's activations, gradients and updates, for `trainctl prove`."""

    file: ClassVar[str] = "settings.json"
    reorder: bool = False
    """Whether matrix products add their terms in another order, to measure what rounding does."""


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """Repetition of the step after the replay on other devices, for `trainctl trial`."""

    file: ClassVar[str] = "trial.json"
    devices: int
    """Number of devices that compute each share of the batch; fewer if there are not as many."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Search for documents in the batch after the replay, for `trainctl data suspects`."""

    file: ClassVar[str] = "search.json"
    by: str
    """Quantity that has a spike: `loss` or `grad_norm`."""
    usual: float
    """Median of the quantity in the steps before."""
    least: float | None
    """Least excess over `usual` that is the spike; None if the recorded value was not finite."""
    most: int
    """Maximum number of documents to name."""


Settings = TypeVar("Settings", RecordingSettings, TrialSettings, SearchSettings)


def request_replay(
    run: RunPaths, settings: RecordingSettings | TrialSettings | SearchSettings
) -> None:
    """Have the ranks of a replay do what the settings say."""
    ensure_folder(run.recording)
    write_json(run.recording / settings.file, asdict(settings))


def requested_replay(run: RunPaths, kind: type[Settings]) -> Settings | None:
    """Return the settings of a kind; None if the ranks are asked for nothing of it."""
    file = run.recording / kind.file
    return kind(**read_json(file)) if file.is_file() else None
