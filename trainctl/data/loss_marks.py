"""Loss marks: the highest bit of a stored token id is set if the token is learned.

So everything that moves ids moves the marks too. They take no space if the vocabulary leaves the
bit free: up to 2^15 ids of two bytes, and above 2^16 ids of four.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.data.token_spans import Ids, Tokens


def marked_vocab_size(vocab_size: int) -> int:
    """Return the size of the id range with marks, at least twice the vocabulary."""
    return 1 << 16 if vocab_size <= 1 << 15 else 1 << 32


def marked(ids: Ids, learnt: npt.NDArray[np.bool_], vocab_size: int) -> npt.NDArray[np.int64]:
    """Set the mark of the learned ids. Both arrays have the shape (tokens,)."""
    return np.where(learnt, ids | (marked_vocab_size(vocab_size) >> 1), ids).astype(np.int64)


def without_marks(ids: Ids) -> Ids:
    """Return the ids as the tokenizer gave them."""
    return ids & _highest(ids, minus=1)


def are_learnt(ids: Ids) -> npt.NDArray[np.bool_]:
    """Return the loss mask of marked ids."""
    found: npt.NDArray[np.bool_] = ids >= _highest(ids)
    return found


@dataclass(frozen=True, slots=True)
class Unmarked:
    """Slices of marked ids, without their marks."""

    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: slice, /) -> Ids:
        return without_marks(self.tokens[place])


@dataclass(frozen=True, slots=True)
class LearntTokens:
    """Loss mask of marked ids, read by slices."""

    tokens: Tokens

    def __getitem__(self, place: slice, /) -> npt.NDArray[np.bool_]:
        return are_learnt(self.tokens[place])


def _highest(ids: Ids, minus: int = 0) -> np.integer:
    """Return the mark bit in the dtype of the ids, less `minus`."""
    found: np.integer = ids.dtype.type((1 << (8 * ids.dtype.itemsize - 1)) - minus)
    return found
