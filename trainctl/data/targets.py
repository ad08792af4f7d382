"""Data stored beside a record's ids: its targets, and prompts with their columns. No torch.

A record's targets are numbers, such as its label or margin, or names of classes. Names are numbered
in the order of `data.classes`, else sorted, over the whole corpus. A part of a store is made before
the names of the other parts are known, so it numbers its own, and the corpus numbers them anew.

A corpus of prompts, whose answers are sampled, keeps a line of JSON for each document: the text of
the prompt, and the other columns (`data.record_encoders.PromptEncoder`), which rewards are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import ObjectiveConfig
from trainctl.errors import TrainctlError
from trainctl.options.objective.classify import ClassifyConfig, Labelling

TARGET = "<f4"
"""numpy dtype of stored targets."""

Targets = Sequence[float | str]
Rows = npt.NDArray[np.float32]


@runtime_checkable
class TargetEncoder(Protocol):
    """An encoder of documents that may have targets."""

    def targets(self, text: str) -> Targets:
        """Return the targets of a document; empty if it has none."""


def targets_of(encoder: object, text: str) -> Targets:
    """Return the targets of a document; empty unless the encoder gives some."""
    return encoder.targets(text) if isinstance(encoder, TargetEncoder) else ()


def check_labels(config: ObjectiveConfig, rows: Rows, classes: Sequence[str] = ()) -> None:
    """Check that a classifier has an output for each label of its texts.

    Args:
        rows: Targets of all texts, (texts, width).
        classes: Names that the targets number; empty if they are numbers themselves.

    Raises:
        TrainctlError: A class has no output, a text has more labels than the problem allows, or
            names are to be predicted as numbers.
    """
    if not isinstance(config, ClassifyConfig):
        return
    outputs, problem = f"objective.outputs={config.outputs}", config.problem
    if problem is Labelling.regression:
        if classes:
            raise TrainctlError(
                f"labels are text ({classes[0]!r}), and objective.problem={problem.value} predicts "
                "numbers",
                hint="write them as numbers, without quotes: 3.5",
            )
        if rows.shape[1] > config.outputs:
            raise TrainctlError(
                f"a text has {rows.shape[1]} numbers to predict, and {outputs}",
                hint=f"objective.outputs={rows.shape[1]}",
            )
        return
    found = np.unique(rows[~np.isnan(rows)])
    wrong = found[(found < 0) | (found != np.floor(found))]
    if len(wrong):
        raise TrainctlError(
            f"a label is {wrong[0]:g}, and classes are numbered from 0",
            hint=f"objective.problem={Labelling.regression.value}, for numbers to predict",
        )
    if len(found) and found[-1] >= config.outputs:
        raise TrainctlError(
            f"a text has class {found[-1]:g}, and {outputs} numbers them from 0",
            hint=f"objective.outputs={found[-1] + 1:g}",
        )
    if problem is Labelling.single_label and ((~np.isnan(rows)).sum(axis=1) != 1).any():
        raise TrainctlError(
            f"a text has not one class, with objective.problem={problem.value}",
            hint=f"objective.problem={Labelling.multi_label.value}",
        )


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """Width of rows of targets, and the names of the classes that they number, in order."""

    width: int = 0
    classes: tuple[str, ...] = ()

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TargetLayout:
        """Return the layout of a manifest; an empty mapping is a layout without targets."""
        return cls(plain.get("width", 0), tuple(plain.get("classes", ())))

    @classmethod
    def of(cls, targets: Sequence[Targets]) -> TargetLayout:
        """Return the layout of some records' targets.

        Raises:
            TrainctlError: Some are names of classes and some are numbers.
        """
        names = {each for row in targets for each in row if isinstance(each, str)}
        if names and any(not isinstance(each, str) for row in targets for each in row):
            raise _mixed(names)
        return cls(max(map(len, targets), default=0), _in_order(names))

    @classmethod
    def joined(cls, layouts: Sequence[TargetLayout], classes: Sequence[str] = ()) -> TargetLayout:
        """Return the layout of all parts of a corpus. `classes` fixes the names and their order.

        Raises:
            TrainctlError: Some parts have names of classes and some have numbers.
        """
        filled = [each for each in layouts if each.width]
        names = {name for each in filled for name in each.classes}
        if names and not all(each.classes for each in filled):
            raise _mixed(names)
        found = tuple(classes) if names and classes else _in_order(names)
        return cls(max((each.width for each in filled), default=0), found)

    def to_array(self, targets: Sequence[Targets]) -> Rows:
        """Return targets as rows, (records, width); NaN follows the last one of a record."""
        number_of: dict[float | str, float] = {name: n for n, name in enumerate(self.classes)}
        rows = np.full((len(targets), self.width), np.nan, dtype=TARGET)
        for row, values in zip(rows, targets, strict=True):
            row[: len(values)] = [number_of.get(each, each) for each in values]
        return rows

    def align(self, rows: Rows, layout: TargetLayout) -> Rows:
        """Return rows of a part in this layout, (records, width)."""
        found = np.full((len(rows), self.width), np.nan, dtype=TARGET)
        found[:, : layout.width] = rows
        if layout.classes:
            numbers = np.array([self.classes.index(name) for name in layout.classes], TARGET)
            is_there = ~np.isnan(found)
            found[is_there] = numbers[found[is_there].astype(np.int64)]
        return found


def name_targets(row: Rows, classes: Sequence[str]) -> list[float | str]:
    """Return the targets of one record, without NaN, and with the names of classes if any."""
    found = row[~np.isnan(row)].tolist()
    return [classes[int(each)] for each in found] if classes else found


NO_TARGETS = TargetLayout()


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names sorted: by their value if all are decimal numbers."""
    every = list(names)
    is_decimal = all(name.isdecimal() for name in every)
    return tuple(sorted(every, key=lambda name: (int(name) if is_decimal else 0, name)))


def _mixed(names: Iterable[str]) -> TrainctlError:
    return TrainctlError(
        f"some labels are names ({min(names)!r}) and some are numbers",
        hint="write all labels of a corpus as names, or all as numbers",
    )


RECORDS = "records.jsonl"
"""Name of the file of a store's part with the line of each document."""

Ids = npt.NDArray[np.int64]


@runtime_checkable
class KeptRecords(Protocol):
    """An encoder of documents whose corpus keeps a line of JSON for each of them."""

    def record(self, text: str, ids: Ids) -> bytes:
        """Return the line of a document, which ends with a line feed and has no other."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, as a rollout and its rewards need it."""

    ids: tuple[int, ...]
    text: str
    """The prompt as the model sees it."""
    columns: Mapping[str, Any]
    """Other columns of its record, as plain JSON, and its `messages` if it has some."""


class PromptRecords:
    """The kept lines of a split's documents, by document number.

    Args:
        raw: Bytes of the file, memory-mapped.
    """

    def __init__(self, raw: npt.NDArray[np.uint8]) -> None:
        self._raw = raw
        step = 1 << 24  # a mask of the whole file would take its size in memory
        places = [
            np.flatnonzero(raw[begin : begin + step] == ord("\n")) + begin + 1
            for begin in range(0, len(raw), step)
        ]
        self._ends = np.concatenate([np.zeros(1, np.int64), *places])

    def prompt(self, document: int, ids: npt.NDArray[np.integer]) -> Prompt:
        """Return a prompt by its document's number and its ids."""
        begin, end = self._ends[document : document + 2]
        text, columns = json.loads(self._raw[begin:end].tobytes())
        return Prompt(tuple(ids.tolist()), text, columns)
