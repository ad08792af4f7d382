"""Recordings of a replay: summaries of its activations, gradients and updates, free of the layout.

A rank that finds `recording/settings.json` in its run directory writes `recording/rank-N.npz`.
A summary of a tensor is the sum of its squares and some sums of its elements with random signs.
Both are sums over elements, so the parts of a tensor that ranks hold add up to the summary of the
whole tensor, however it is cut. The mean square of the differences between two such sums is an
unbiased estimate of the squared norm of the tensors' difference (AMS sketches,
doi:10.1145/237814.237823).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.runs.files import write_bytes
from trainctl.runs.layout import RunPaths

Numbers = npt.NDArray[np.float64]

PROJECTIONS = 4
"""Sums with random signs of each summary: all of them are 100 times too small once in 10^7 times.
"""
GROUPS = 64
"""Most groups of rows, columns, features or samples that have a summary of their own."""
MOST_HEADS = 256
"""Most groups where each is an attention head."""


class RecordedKind(StrEnum):
    """Kinds of recorded tensors, in the order of computation within a step."""

    forward = "forward"
    gradient = "gradient"
    update = "update"


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a tensor. Each array has rows of a sum of squares and `PROJECTIONS` sums."""

    lines: Numbers
    """One line for each group of samples (activations) or of rows (parameters)."""
    columns: Numbers
    """One line for each group of features (activations) or of columns (parameters)."""

    def __add__(self, other: Summary) -> Summary:
        return Summary(self.lines + other.lines, self.columns + other.columns)

    def is_same(self, other: Summary) -> bool:
        """Return True if every number is the same; NaN is the same as NaN."""
        pairs = ((self.lines, other.lines), (self.columns, other.columns))
        return all(np.array_equal(one, two, equal_nan=True) for one, two in pairs)


Key = tuple[int, RecordedKind, str]
"""Step, kind and name of a tensor."""


@dataclass(slots=True)
class Recording:
    """Summaries that one rank recorded, or all ranks together."""

    order: list[str] = field(default_factory=list)
    """Names of the activations in the order of computation."""
    losses: dict[int, float] = field(default_factory=dict)
    """Loss of each step in nats, as the step's record has it."""
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size of each tensor along the axes of `Summary.lines` and `Summary.columns`, by name."""
    summaries: dict[Key, Summary] = field(default_factory=dict)
    roundings: dict[str, float] = field(default_factory=dict)
    """Sum of squares of the rounding of each master weight after the last step, by parameter: an
    update cannot be more exact.
    """

    def write(self, path: Path, stage: int) -> None:
        """Write a rank's recording; `stage` is the index of its pipeline stage.

        Raises:
            OSError: The disk is full, or the folder cannot be written.
        """
        arrays: dict[str, Any] = {}
        for (step, kind, name), summary in self.summaries.items():
            arrays |= {f"{step}/{kind}/{name}/{part}": v for part, v in asdict(summary).items()}
        about = {name: getattr(self, name) for name in ("order", "losses", "sizes", "roundings")}
        about["stage"] = stage
        content = io.BytesIO()
        np.savez(content, about=np.array(json.dumps(about)), **arrays)
        write_bytes(path, content.getvalue())

    @property
    def steps(self) -> list[int]:
        """Numbers of the recorded steps."""
        return sorted(self.losses)

    def of_kind(self, step: int, kind: RecordedKind) -> dict[str, Summary]:
        """Return the summaries of a kind in a step, by name."""
        return {n: each for (at, of, n), each in self.summaries.items() if (at, of) == (step, kind)}


def read_recording(run: RunPaths) -> Recording:
    """Return the recordings of all ranks of a run, added up."""
    ranks = sorted(_read_ranks(run.recording), key=lambda rank: rank[0])
    whole = Recording()
    for _, rank in ranks:
        whole.order += [name for name in rank.order if name not in set(whole.order)]
        whole.losses |= rank.losses
        whole.sizes |= rank.sizes
        for name, square in rank.roundings.items():
            whole.roundings[name] = whole.roundings.get(name, 0.0) + square
        for key, summary in rank.summaries.items():
            known = whole.summaries.get(key)
            whole.summaries[key] = summary if known is None else known + summary
    return whole


def _read_ranks(folder: Path) -> Iterator[tuple[int, Recording]]:
    for path in sorted(folder.glob("rank-*.npz")):
        with np.load(path, allow_pickle=False) as stored:
            about: Mapping[str, Any] = json.loads(str(stored["about"]))
            rank = Recording(
                order=about["order"],
                losses={int(step): loss for step, loss in about["losses"].items()},
                sizes={name: (rows, columns) for name, (rows, columns) in about["sizes"].items()},
                roundings=about["roundings"],
            )
            for entry in stored.files:
                if entry.endswith("/lines"):
                    step, kind, name, _ = entry.split("/")
                    summary = Summary(stored[entry], stored[f"{step}/{kind}/{name}/columns"])
                    rank.summaries[int(step), RecordedKind(kind), name] = summary
        yield about["stage"], rank


@cache
def signs(size: int, axis: str) -> Numbers:
    """Return the random signs of the indices of an axis, (PROJECTIONS, size).

    They depend on nothing else, not on a library's generator: two environments compare.
    """
    salt = sum(ord(letter) << (8 * place) for place, letter in enumerate(axis[:7]))
    state = np.arange(size, dtype=np.uint64) + np.uint64(salt << 8)
    with np.errstate(over="ignore"):  # splitmix64 (doi:10.1145/2660193.2660195)
        state = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    bits = (state >> np.arange(PROJECTIONS, dtype=np.uint64)[:, None]) & np.uint64(1)
    return bits.astype(np.float64) * 2 - 1


def num_groups(size: int, name: str, head_dim: int | None) -> int:
    """Return how many groups an axis is cut into: one a head where the axis is made of heads."""
    if head_dim and "attn" in name and size % head_dim == 0:
        heads = size // head_dim
        if 1 < heads <= MOST_HEADS:
            return heads
    return max(1, min(size, GROUPS))
