"""Comparison of the ranks' last collectives: which one does not end, and because of whom.

`trainctl.engines.flight_recorder` writes the records. Calls of a process group are numbered on each
rank, and the calls with one number belong together.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_MOST_LISTED = 4
"""Most ranks whose place a sentence tells."""
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"
_FRAMEWORKS = ("-packages/torch/", "-packages/deepspeed/")
"""Packages whose frames tell less than the code that called them."""
_SAME_SIZES = {"all_reduce", "allreduce", "broadcast", "reduce", "_allgather_base", "barrier"}
"""Operations in which all ranks have tensors of one size."""

Call = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RankState:
    """Answer of a rank, or the state of a rank that did not answer."""

    record: Mapping[str, Any] | None
    """Record that the rank wrote; None if it wrote none."""
    stack: Sequence[str]
    """Lines of its main thread's stack as faulthandler writes them, innermost first."""
    state: str = "does not answer"
    """State of a rank without a stack, to follow "rank N"."""

    @property
    def place(self) -> str:
        """Place or state of the rank, to follow "rank N"."""
        return f"is in {place_of(self.stack)}" if self.stack else self.state


@dataclass(frozen=True, slots=True)
class StuckCollective:
    """A collective that does not end."""

    operation: str
    types: Sequence[str]
    """Type of each input tensor."""
    sizes: Sequence[Sequence[int]]
    """Shape of each input tensor; both on the first rank that entered."""
    group: str
    """Description of the process group; empty if it has none."""
    ranks: Sequence[int]
    """Global ranks of the process group."""
    sequence: int
    """Number of the collective in its group, from 1."""
    entered: Sequence[int]
    elsewhere: Mapping[int, str]
    """Place of each rank that has not entered, or that called something else."""
    sentence: str


def place_of(stack: Sequence[str]) -> str:
    """Return function, file and line of the innermost frame outside of libraries."""
    frames = [re.match(r'  File "(.*)", line (\d+) in (.*)', line) for line in stack]
    known = [frame for frame in frames if frame]
    own = [frame for frame in known if not _is_library(frame[1])]
    found = next(iter(own or known), None)
    if found:
        return f"{found[3]} ({found[1]}:{found[2]})"
    return stack[0].strip() if stack else "an unknown place"


def _is_library(file: str) -> bool:
    is_standard = file.startswith(_STANDARD_LIBRARY) and "-packages/" not in file
    return is_standard or file.startswith("<") or any(part in file for part in _FRAMEWORKS)


def find_stuck(states: Mapping[int, RankState]) -> StuckCollective | None:
    """Return the collective that the ranks wait in; None if no rank waits in a recorded one.

    If the ranks of a group called different collectives under one number, it is the first of these.
    Else, of several, it is one that waits for ranks which wait in none themselves.
    """
    groups = list(_groups(states))
    waiting = {rank for group in groups for rank in group.first_open}
    for group in groups:
        different = group.different(states)
        if different is not None:
            return different
    stuck = [group for group in groups if group.first_open]
    if not stuck:
        return None
    return max(stuck, key=lambda group: group.order(waiting)).waits(groups, states)


@dataclass(frozen=True, slots=True)
class _Group:
    """Collectives of one process group."""

    description: str
    ranks: Sequence[int]
    calls: Mapping[int, Mapping[int, Call]]
    """Calls by rank and number."""

    @property
    def name(self) -> str:
        of = f"the group {self.description} of " if self.description else ""
        return f"{of}{rank_names(self.ranks)}"

    @property
    def first_open(self) -> dict[int, int]:
        """Number of the first collective that has not ended on each rank that waits."""
        found = {}
        for rank, calls in self.calls.items():
            numbers = [number for number, call in calls.items() if not call["is_done"]]
            if numbers:
                found[rank] = min(numbers)
        return found

    @property
    def missing(self) -> list[int]:
        """Ranks that have not entered the first collective that is open."""
        number = min(self.first_open.values())
        return [rank for rank in self.ranks if max(self.calls.get(rank, {0: {}})) < number]

    def order(self, waiting: set[int]) -> tuple[bool, bool, bool]:
        """Return the order of groups by what they tell: the greatest is the one to blame."""
        missing = set(self.missing)
        is_main = any(self.calls[rank][n]["is_main"] for rank, n in self.first_open.items())
        return bool(missing) and not missing & waiting, bool(missing - waiting), is_main

    def different(self, states: Mapping[int, RankState]) -> StuckCollective | None:
        """Return the first collective of which ranks called different ones, if some rank waits."""
        if not self.first_open:
            return None
        numbers = sorted({number for calls in self.calls.values() for number in calls})
        for number in numbers:
            calls = {rank: of[number] for rank, of in self.calls.items() if number in of}
            kinds: dict[str, list[int]] = defaultdict(list)
            for rank, call in calls.items():
                kinds[_kind(call)].append(rank)
            if len(kinds) > 1:
                return self._described(number, calls, kinds, states)
        return None

    def _described(
        self,
        number: int,
        calls: Mapping[int, Call],
        kinds: Mapping[str, list[int]],
        states: Mapping[int, RankState],
    ) -> StuckCollective:
        first, *others = sorted(kinds.values(), key=len, reverse=True)
        texts = [
            f"{rank_names(ranks)} called {describe_call(calls[ranks[0]])}, and "
            f"{'is' if len(ranks) == 1 else f'rank {ranks[0]} is'} in "
            f"{states[ranks[0]].place.removeprefix('is in ')}"
            for ranks in (first, *others)
        ]
        return self._stuck(
            number,
            calls[first[0]],
            entered=first,
            elsewhere={rank: states[rank].place for ranks in others for rank in ranks},
            sentence=f"collective {number} of {self.name} is not the same on all: "
            + "; ".join(texts),
        )

    def waits(self, groups: list[_Group], states: Mapping[int, RankState]) -> StuckCollective:
        """Return the first collective that has not ended, with the ranks it waits for."""
        rank, number = min(self.first_open.items(), key=lambda item: item[1])
        missing = self.missing
        entered = [each for each in self.ranks if each not in missing]
        places = {each: _where(each, self, groups, states) for each in missing}
        listed = [f"rank {each} {places[each]}" for each in missing[:_MOST_LISTED]]
        if len(missing) > _MOST_LISTED:
            listed.append(f"so have not {len(missing) - _MOST_LISTED:,} more")
        rest = "; ".join(listed) or "no rank is missing: look at the network and the devices"
        at = f"{rank_names(entered)} entered it by {place_of(states[rank].stack)}"
        return self._stuck(
            number,
            self.calls[rank][number],
            entered=entered,
            elsewhere=places,
            sentence=f"collective {number} of {self.name}, "
            f"{describe_call(self.calls[rank][number])}, does not end: {at}; {rest}",
        )

    def _stuck(self, number: int, call: Call, **fields: Any) -> StuckCollective:
        return StuckCollective(
            operation=call["operation"],
            types=call["types"],
            sizes=call["sizes"],
            group=self.description,
            ranks=self.ranks,
            sequence=number,
            **fields,
        )


def _groups(states: Mapping[int, RankState]) -> Iterator[_Group]:
    calls: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Call]]] = {}
    descriptions = {}
    for rank, state in states.items():
        record = state.record or {"groups": {}, "calls": []}
        for call in record["calls"]:
            known = record["groups"].get(call["group"], {"ranks": [rank], "description": ""})
            key = call["group"], tuple(known["ranks"])
            descriptions[key] = known["description"].replace("undefined", "")
            calls.setdefault(key, {}).setdefault(rank, {})[call["sequence"]] = call
    for key, by_rank in calls.items():
        yield _Group(descriptions[key], list(key[1]), by_rank)


def _kind(call: Call) -> str:
    """Return what must be the same on all ranks of a collective."""
    operation = call["operation"]
    if operation not in _SAME_SIZES:
        return operation
    return f"{operation} {call['types']} {[math.prod(size) for size in call['sizes']]}"


def _where(rank: int, group: _Group, groups: list[_Group], states: Mapping[int, RankState]) -> str:
    """Return where a rank is that has not entered, with the collective it waits in itself."""
    place = states[rank].place if rank in states else RankState(None, ()).place
    for other in groups:
        if other is not group and rank in other.first_open:
            number = other.first_open[rank]
            call = describe_call(other.calls[rank][number])
            return f"waits in collective {number} of {other.name}, {call}, and {place}"
    return place


def describe_call(call: Call) -> str:
    """Return operation, type and shape, such as ``all_reduce of float32 [1024]``."""
    tensors = [f"{kind} {size}" for kind, size in zip(call["types"], call["sizes"], strict=False)]
    more = f" and {len(tensors) - 2} more" if len(tensors) > 2 else ""
    return f"{call['operation']}{' of ' if tensors else ''}{', '.join(tensors[:2])}{more}"


def rank_names(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as ``ranks 0 to 3 and 5``."""
    runs: list[str] = []
    for _, pairs in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [str(rank) for _, rank in pairs]
        runs += run if len(run) < 3 else [f"{run[0]} to {run[-1]}"]
    head = ", ".join(runs[:-1])
    names = f"{head} and {runs[-1]}" if head else runs[-1]
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
