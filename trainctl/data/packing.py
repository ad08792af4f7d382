"""Best-fit packing: assigns pieces of documents to samples so that few documents are cut.

Documents up to the length of a sample stay whole. Longer ones are cut into whole samples and a
remainder. Remainders and short documents go into bins of a sample's length by *best-fit
decreasing*: the longest first, each into the bin with the least sufficient room (Ding et al. 2024,
arXiv:2404.10830). Every token is in exactly one bin. The rest of a bin is padding without a loss.

Lengths are small integers, so pieces of one length are placed together, and bins are indexed by
remaining room. No bin has to be searched for; the cost is one sort.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainctl.data.loss_marks import LearntTokens

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of documents to pack, in the order of the text."""

    starts: Array
    """Position of each piece's first token in the text."""
    lengths: Array
    """Tokens of each piece, from 1 to the length of a sample."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Assignment of pieces to samples: bin i is sample i."""

    starts: Array
    """Position of each piece's first token in the text, bin after bin."""
    lengths: Array
    """Tokens of each piece."""
    firsts: Array
    """Index of each bin's first piece, and the total number of pieces, (bins + 1,)."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of conversations packed, cut and left out; empty for other texts."""

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def pieces(self, number: int) -> tuple[list[int], list[int]]:
        """Return starts and lengths of a bin's pieces, in the order of the text."""
        place = slice(int(self.firsts[number]), int(self.firsts[number + 1]))
        return self.starts[place].tolist(), self.lengths[place].tolist()

    def bin_of(self, token: int) -> int | None:
        """Return the bin that contains a token of the text. All pieces are searched.

        None if the token belongs to a conversation that was left out, or to a part that was cut
        off.
        """
        found = np.flatnonzero((self.starts <= token) & (token < self.starts + self.lengths))
        if not len(found):
            return None
        return int(np.searchsorted(self.firsts, found[0], side="right")) - 1


def pieces_of(ends: npt.NDArray[np.integer], length: int) -> Pieces:
    """Return documents as pieces; longer documents become pieces of `length` and a remainder.

    `ends` has the end (exclusive) of each document; empty documents have no piece.
    """
    ends = ends.astype(np.int64)
    begins = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
    counts = -(-(ends - begins) // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + number * length
    return Pieces(starts, np.minimum(np.repeat(ends, counts) - starts, length))


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations to pack, with the numbers of those changed or left out."""

    pieces: Pieces
    """One piece per kept conversation; its beginning if the conversation is too long."""
    counts: dict[str, int]
    """Number of conversations, and numbers cut and left out by reason."""


def conversations_of(
    ends: npt.NDArray[np.integer], length: int, learnt: LearntTokens, *, cuts: bool
) -> Conversations:
    """Return each conversation as one piece; conversations that are too long are cut or left out.

    A cut conversation is left out too if nothing in its beginning is learned. So is a conversation
    that its template could not render, which has no token.

    Args:
        ends: End (exclusive) of each conversation.
        learnt: Loss mask, read by slices.
        cuts: Whether to keep the beginning of conversations that are too long.
    """
    ends = ends.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
    lengths = ends - starts
    long = np.flatnonzero(lengths > length)
    left = [bool(learnt[s + 1 : s + length + 1].any()) for s in starts[long].tolist() if cuts]
    stays = lengths > 0
    stays[long] = left if cuts else False
    counts = {
        "conversations": len(ends),
        "cut": sum(left),
        "dropped_too_long": 0 if cuts else len(long),
        "dropped_nothing_left": len(left) - sum(left),
        "dropped_unwritten": int((lengths == 0).sum()),
    }
    return Conversations(Pieces(starts[stays], np.minimum(lengths[stays], length)), counts)


def one_bin_per_piece(pieces: Pieces) -> Bins:
    """Return one bin per piece, in the order of the text."""
    firsts = np.arange(len(pieces.starts) + 1, dtype=np.int64)
    return Bins(pieces.starts, pieces.lengths, firsts)


def pack(pieces: Pieces, length: int) -> Bins:
    """Pack by best-fit decreasing. The result depends only on the lengths; the cost is one sort."""
    order = np.argsort(-pieces.lengths, kind="stable")
    bin_of = np.empty(len(order), dtype=np.int64)
    placed = count = 0
    rooms = _Rooms()
    of_length = np.bincount(pieces.lengths, minlength=length + 1).tolist()
    for size in range(length, 0, -1):
        left = of_length[size]
        while left:
            # A bin that has taken a piece has the least room, so it is next again.
            room = rooms.least(size)
            each = (room or length) // size
            wanted = -(-left // each)
            if room:
                bins = rooms.take(room, wanted)
            else:
                room, bins = length, np.arange(count, count + wanted)
                count += wanted
            taken = min(left, len(bins) * each)
            whole, rest = divmod(taken, each)
            bin_of[placed : placed + taken] = np.repeat(bins, each)[:taken]
            rooms.add(room - each * size, bins[:whole])
            rooms.add(room - rest * size, bins[whole:])
            placed, left = placed + taken, left - taken
    by_bin = np.lexsort((order, bin_of))
    firsts = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=count))])
    chosen = order[by_bin]
    return Bins(pieces.starts[chosen], pieces.lengths[chosen], firsts.astype(np.int64))


class _Rooms:
    """Bin numbers indexed by their remaining room."""

    def __init__(self) -> None:
        self._bins: dict[int, list[Array]] = {}
        self._rooms: list[int] = []

    def add(self, room: int, bins: Array) -> None:
        """Add bins with this room; full bins are dropped."""
        if room and len(bins):
            if room not in self._bins:
                insort(self._rooms, room)
                self._bins[room] = []
            self._bins[room].append(bins)

    def least(self, size: int) -> int:
        """Return the smallest room of at least `size`; 0 if there is none."""
        place = bisect_left(self._rooms, size)
        return self._rooms[place] if place < len(self._rooms) else 0

    def take(self, room: int, most: int) -> Array:
        """Remove and return up to `most` bins with this room, at least one."""
        runs = self._bins[room]
        bins, rest = runs[-1][:most], runs[-1][most:]
        if len(rest):
            runs[-1] = rest
        else:
            runs.pop()
        if not runs:
            del self._bins[room]
            self._rooms.remove(room)
        return bins
