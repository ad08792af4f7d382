"""Which tokens are learnt, kept with their ids: the highest bit of each is set where one is.

So everything that moves ids moves it too, and it takes no room where a vocabulary leaves that bit
free: below 2^15 ids of two bytes, and above 2^16 of four.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.data.in_place import Ids, Tokens


def with_mark(vocab_size: int) -> int:
    """How many ids there are with the mark, at least as many without it."""
    return 1 << 16 if vocab_size <= 1 << 15 else 1 << 32


def marked(ids: Ids, learnt: npt.NDArray[np.bool_], vocab_size: int) -> npt.NDArray[np.int64]:
    """Ids of a vocabulary with their marks.

    Args:
        ids: Shape (tokens,).
        learnt: Which of them are learnt, (tokens,).
        vocab_size: Ids that there are.
    """
    return np.where(learnt, ids | (with_mark(vocab_size) >> 1), ids).astype(np.int64)


def without_marks(ids: Ids) -> Ids:
    """Ids as the tokenizer gave them."""
    return ids & _highest(ids, minus=1)


def are_learnt(ids: Ids) -> npt.NDArray[np.bool_]:
    """Which of marked ids are learnt."""
    found: npt.NDArray[np.bool_] = ids >= _highest(ids)
    return found


@dataclass(frozen=True, slots=True)
class Unmarked:
    """Marked ids, read by slices as the tokenizer gave them."""

    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: slice, /) -> Ids:
        return without_marks(self.tokens[place])


@dataclass(frozen=True, slots=True)
class LearntTokens:
    """Of marked ids, by slices, which are learnt."""

    tokens: Tokens

    def __getitem__(self, place: slice, /) -> npt.NDArray[np.bool_]:
        return are_learnt(self.tokens[place])


def _highest(ids: Ids, minus: int = 0) -> np.integer:
    """Return the mark in the type of ids, less a number."""
    found: np.integer = ids.dtype.type((1 << (8 * ids.dtype.itemsize - 1)) - minus)
    return found
