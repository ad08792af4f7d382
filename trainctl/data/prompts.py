"""Prompts whose answers are sampled, with the columns of their records, which rewards are given.

A corpus of prompts keeps a line of JSON for each document beside its ids: the text of the prompt,
and the other columns (`data.record_encoders.PromptEncoder`). No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

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
