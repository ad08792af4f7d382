"""Turns of sources: an interleaving whose every prefix is less than one draw off the shares.

Weights become whole numbers q of sum Q; a period has Q slots. Draw k of a source may take the slots
from ``floor(k Q / q)`` to ``ceil((k + 1) Q / q) - 1``. These are the windows of a pfair task of
rate q / Q (Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", 1996); the rates have the
sum 1, so a schedule that meets all of them exists, and on one processor earliest deadline first
finds it (Tijdeman, "The chairman assignment problem", 1980). Then ``floor(m q / Q) <= drawn <=
ceil(m q / Q)`` at every prefix m.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import floor, gcd, lcm

import numpy as np
import numpy.typing as npt

MOST_SLOTS = 10**6
"""Maximum slots of a period: weights that need more are rounded to this many parts."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Turns:
    """One period of a mixture's schedule, which is repeated."""

    quotas: Integers
    """Draws of each source per period."""
    source: Integers
    """Source of each slot."""
    rank: Integers
    """Number of earlier draws of each slot's source in the period."""
    slots: tuple[Integers, ...]
    """Slots of each source, ascending."""

    @property
    def size(self) -> int:
        return len(self.source)

    def drawn(self, source: int, draws: int) -> int:
        """Return the number of a source's draws among the first `draws` of all sources."""
        periods, rest = divmod(draws, self.size)
        inside = int(np.searchsorted(self.slots[source], rest))
        return periods * int(self.quotas[source]) + inside

    def position(self, source: int, draw: int) -> int:
        """Return the position of a source's draw (from 0) among all draws: the inverse of
        `drawn`.
        """
        periods, rank = divmod(draw, int(self.quotas[source]))
        return periods * self.size + int(self.slots[source][rank])


@cache
def turns_of(quotas: tuple[int, ...]) -> Turns:
    """Return the period of quotas without a common divisor. Takes about 1 s for 10^6 slots.

    Of draws that are due at the same slot the source with the lower number is first.
    """
    total = sum(quotas)
    source, rank = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    waiting = [(0, index, 0) for index, quota in enumerate(quotas) if quota]
    due: list[tuple[int, int, int]] = []
    for slot in range(total):
        while waiting and waiting[0][0] <= slot:
            _, index, draw = heapq.heappop(waiting)
            heapq.heappush(due, (-(-(draw + 1) * total // quotas[index]), index, draw))
        _, index, draw = heapq.heappop(due)
        source[slot], rank[slot] = index, draw
        if draw + 1 < quotas[index]:
            released = (draw + 1) * total // quotas[index]
            heapq.heappush(waiting, (released, index, draw + 1))
    slots = tuple(np.flatnonzero(source == index) for index in range(len(quotas)))
    return Turns(np.array(quotas, dtype=np.int64), source, rank, slots)


def quotas_of(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return weights as whole numbers without a common divisor, in exactly their proportions.

    If that needs more than `MOST_SLOTS` slots, proportions are rounded to `MOST_SLOTS` parts by
    largest remainders. A weight above 0 always gets at least one slot.
    """
    total = sum(weights, Fraction(0))
    shares = [weight / total for weight in weights]
    slots = lcm(*(share.denominator for share in shares))
    if slots > MOST_SLOTS:
        return _rounded(shares)
    return tuple(int(share * slots) for share in shares)


def _rounded(shares: list[Fraction]) -> tuple[int, ...]:
    wanted = [share * MOST_SLOTS for share in shares]
    quotas = [max(floor(each), int(each > 0)) for each in wanted]
    by_remainder = sorted(range(len(shares)), key=lambda i: (quotas[i] - wanted[i], i))
    missing = MOST_SLOTS - sum(quotas)
    for index in by_remainder[: max(0, missing)]:
        quotas[index] += 1
    quotas[quotas.index(max(quotas))] += min(0, missing)
    divisor = gcd(*quotas)
    return tuple(quota // divisor for quota in quotas)
