"""Best-fit packing: which pieces of which documents a sample has, so that few are cut.

Documents of at most a sample's length stay whole; longer ones are cut into whole samples and a
rest. Rests and short documents go into bins of a sample's length by *best-fit decreasing*: the
longest first, each into the bin that has the least room for it (Ding et al. 2024,
arXiv:2404.10830). Every token is in one bin, once; what a bin has left is padding, without a loss.

Lengths are small whole numbers: pieces of one length are placed together, and bins are known by the
room that they have left. So no bin is looked for, and a sort is what it costs.
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
    """What is packed, in the order of the text."""

    starts: Array
    """First token of each piece, in the text."""
    lengths: Array
    """Its tokens, from one to a sample's."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Which pieces a sample has."""

    starts: Array
    """First token of each piece in the text, bin after bin."""
    lengths: Array
    """Tokens of each."""
    firsts: Array
    """Number of each bin's first piece; one more is the end of the last."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many conversations were packed, cut and left out; empty of other texts."""

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def pieces(self, number: int) -> tuple[list[int], list[int]]:
        """Starts and lengths of a bin's pieces, in the order of the text: two slices."""
        place = slice(int(self.firsts[number]), int(self.firsts[number + 1]))
        return self.starts[place].tolist(), self.lengths[place].tolist()

    def bin_of(self, token: int) -> int | None:
        """Return the bin that has a token of the text: all pieces are looked through.

        None has one of a conversation that was left out, or of what was cut off.
        """
        found = np.flatnonzero((self.starts <= token) & (token < self.starts + self.lengths))
        if not len(found):
            return None
        return int(np.searchsorted(self.firsts, found[0], side="right")) - 1


def pieces_of(ends: npt.NDArray[np.integer], length: int) -> Pieces:
    """Documents as they are, and those longer than a sample in pieces of one and the rest.

    Args:
        ends: Of the documents, one past the last token of each; empty ones have no piece.
    """
    ends = ends.astype(np.int64)
    begins = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
    counts = -(-(ends - begins) // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + number * length
    return Pieces(starts, np.minimum(np.repeat(ends, counts) - starts, length))


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations that are packed, and those that are not."""

    pieces: Pieces
    """One of each that stays, its beginning where it is too long."""
    counts: dict[str, int]
    """How many there are, and why others are not as they were, by reason."""


def conversations_of(
    ends: npt.NDArray[np.integer], length: int, learnt: LearntTokens, *, cuts: bool
) -> Conversations:
    """Return each conversation in one piece; those that are too long are cut or left out.

    One that is cut is left out too if nothing of what is left is learnt; so is one that its
    template could not write, which has no token.

    Args:
        ends: One past the last token of each.
        learnt: Which tokens are learnt, by slices.
        cuts: Whether the beginning of those that are too long stays.
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


def each_alone(pieces: Pieces) -> Bins:
    """Return a bin of its own for every piece, in the order of the text."""
    firsts = np.arange(len(pieces.starts) + 1, dtype=np.int64)
    return Bins(pieces.starts, pieces.lengths, firsts)


def pack(pieces: Pieces, length: int) -> Bins:
    """Best-fit decreasing: a function of the lengths alone, in the time of a sort."""
    order = np.argsort(-pieces.lengths, kind="stable")
    bin_of = np.empty(len(order), dtype=np.int64)
    placed = count = 0
    rooms = _Rooms()
    of_length = np.bincount(pieces.lengths, minlength=length + 1).tolist()
    for size in range(length, 0, -1):
        left = of_length[size]
        while left:
            # The bin that has taken one has less room than the others, and so is next again.
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
    """Numbers of bins by the room that they have left."""

    def __init__(self) -> None:
        self._bins: dict[int, list[Array]] = {}
        self._rooms: list[int] = []

    def add(self, room: int, bins: Array) -> None:
        """More bins; those that are full are done with."""
        if room and len(bins):
            if room not in self._bins:
                insort(self._rooms, room)
                self._bins[room] = []
            self._bins[room].append(bins)

    def least(self, size: int) -> int:
        """Return the least room of a bin with at least so much; 0 where none has it."""
        place = bisect_left(self._rooms, size)
        return self._rooms[place] if place < len(self._rooms) else 0

    def take(self, room: int, most: int) -> Array:
        """Some bins with that room, at least one."""
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
