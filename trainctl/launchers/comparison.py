"""Comparison of two replays: the first tensor that differs by more than rounding explains.

The rounding expected of a tensor is measured: it is the difference between two replays of one
configuration, one of them with the terms of its matrix products in another order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from trainctl.runs.recording import Numbers, RecordedKind, Recording, Summary

FACTOR = 8.0
"""Differences up to this many times the expected rounding count as rounding.

A change of the layout reorders other sums than the measurement does, in attention, norms and means,
and an estimate of a norm from a few projections is off by a third.
"""

LOSS_UNIT = 2.0**-23
"""Spacing of the numbers of fp32 next to 1: a loss is summed in fp32 at least."""

LEAST_GROUPS = 4
"""Fewest groups of an axis, of which the worst is left out."""

_LAYER = re.compile(r"\.(\d+)\.")


class Verdict(StrEnum):
    """Result of a comparison, from the best to the worst."""

    equal = "equal"
    within_rounding = "within_rounding"
    differs = "differs"


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Difference of one tensor, or of the loss, between two replays."""

    step: int
    kind: str
    """`forward`, `loss`, `gradient` or `update`."""
    tensor: str
    """Name of the layer or the parameter, as transformers has it."""
    layer: int | None
    """Number of the block; None outside the blocks."""
    size: float
    """Norm of the difference divided by the norm of the tensor."""
    expected: float
    """Rounding expected, in the same unit; up to `FACTOR` times as much counts as rounding."""
    ratio: float
    """Norm of the changed tensor divided by that of the recorded one."""
    where: str = ""
    """Part of the tensor that alone differs, such as `head 2`; empty if no part stands out."""

    @property
    def is_rounding(self) -> bool:
        return self.size <= FACTOR * self.expected

    def __str__(self) -> str:
        what = f"{self.kind} of {self.tensor}" if self.tensor else self.kind
        what = what if self.kind != "forward" else f"output of {self.tensor}"
        part = f", {self.where}" if self.where else ""
        times = f", {self.ratio:.4g} times as large" if abs(self.ratio - 1) > 0.01 else ""
        layer = "" if self.layer is None else f" (layer {self.layer})"
        return (
            f"{what}{layer}{part} at step {self.step:,}, by {self.size:.3g} relative{times} "
            f"(rounding: {self.expected:.2g})"
        )


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Comparison of one step."""

    step: int
    loss: float
    """Loss of the replay as recorded, in nats."""
    changed_loss: float
    differences: Mapping[str, TensorDifference]
    """Difference of each kind that is the largest multiple of the expected rounding."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing two replays."""

    verdict: Verdict
    first: TensorDifference | None
    """First difference above rounding in the order of computation; None without one."""
    steps: tuple[StepComparison, ...]
    tensors: int
    """Number of tensors that both replays recorded, in all steps."""


def compare(
    recorded: Recording,
    changed: Recording,
    reordered: Sequence[tuple[Recording, Recording]],
    *,
    unit: float,
    head_dim: int | None,
    tokens: int,
) -> Comparison:
    """Compare the replay as recorded with the changed one.

    Args:
        reordered: Pairs of replays that differ in the order of their sums alone.
        unit: Spacing of the numbers next to 1 in the coarser of the compute formats: the least
            rounding that is expected.
        head_dim: Width of an attention head, to name heads.
        tokens: Tokens of a step, over which the rounding of single losses averages out.
    """
    steps: list[StepComparison] = []
    first, is_equal, tensors = None, True, 0
    for step in recorded.steps:
        found = list(_step_differences(step, recorded, changed, reordered, unit, tokens))
        worst: dict[str, TensorDifference] = {}
        for each in found:
            known = worst.get(each.kind)
            if known is None or each.size / each.expected > known.size / known.expected:
                worst[each.kind] = each
        common = [key for key in recorded.summaries.keys() & changed.summaries if key[0] == step]
        is_equal &= worst["loss"].size == 0 and all(
            recorded.summaries[key].is_same(changed.summaries[key]) for key in common
        )
        tensors += len(common)
        if first is None:
            first = next((each for each in found if not each.is_rounding), None)
            first = first and _located(first, recorded, changed, head_dim)
        losses = recorded.losses[step], changed.losses.get(step, math.nan)
        steps.append(StepComparison(step, *losses, worst))
    verdict = Verdict.equal if is_equal else Verdict.within_rounding
    return Comparison(verdict if first is None else Verdict.differs, first, tuple(steps), tensors)


def _step_differences(
    step: int,
    recorded: Recording,
    changed: Recording,
    reordered: Sequence[tuple[Recording, Recording]],
    unit: float,
    tokens: int,
) -> Iterator[TensorDifference]:
    """Yield the differences of a step in the order of computation."""
    of_loss = unit
    for kind in RecordedKind:
        one, other = recorded.of_kind(step, kind), changed.of_kind(step, kind)
        names = [name for name in _in_order(kind, recorded, one) if name in other]
        spread = _spread(step, kind, names, reordered)
        if kind is RecordedKind.gradient:
            losses = [(a.losses[step], b.losses[step]) for a, b in reordered]
            spreads = [_relative(*pair) for pair in losses]
            of_loss = max(LOSS_UNIT, of_loss / math.sqrt(tokens), *spreads)
            was, now = recorded.losses[step], changed.losses.get(step, math.nan)
            ratio = now / was if was else math.nan
            yield TensorDifference(step, "loss", "", None, _relative(was, now), of_loss, ratio)
        for name in names:
            expected = max(unit, spread[name])
            if kind is RecordedKind.update:
                square = recorded.roundings.get(name, 0.0)
                expected = max(expected, float(_root_share(square, one[name].lines[:, 0].sum())))
            of_loss = expected if kind is RecordedKind.forward else of_loss
            ratio = _ratio(one[name], other[name])
            size = distance(one[name], other[name], kind)
            yield TensorDifference(step, kind.value, name, layer_of(name), size, expected, ratio)


def _in_order(kind: RecordedKind, recording: Recording, found: Mapping[str, Summary]) -> list[str]:
    """Return names in the order of computation: forward by depth, parameters from the end back."""
    if kind is RecordedKind.forward:
        return [name for name in recording.order if name in found]
    place = {name: index for index, name in enumerate(recording.order or recording.sizes)}
    key = str if not recording.order else _module_of
    return sorted(found, key=lambda name: place.get(key(name), -1), reverse=True)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def layer_of(name: str) -> int | None:
    """Return the number of the block that a layer or parameter belongs to, if any."""
    found = _LAYER.search(f"{name}.")
    return int(found[1]) if found else None


def _spread(
    step: int,
    kind: RecordedKind,
    names: Sequence[str],
    pairs: Sequence[tuple[Recording, Recording]],
) -> dict[str, float]:
    """Return the measured rounding of each tensor.

    It is the largest among the tensors of its name in this block and those computed before it in
    the pass: of a single tensor it is a small sample.
    """
    own = dict.fromkeys(names, 0.0)
    for one, other in pairs:
        left, right = one.of_kind(step, kind), other.of_kind(step, kind)
        for name in names:
            if name in left and name in right:
                own[name] = max(own[name], distance(left[name], right[name], kind))
    found, largest = {}, dict[str, float]()
    for name in names:  # in the order of computation
        alike = _LAYER.sub(".*.", f"{name}.", count=1)
        largest[alike] = max(largest.get(alike, 0.0), own[name])
        found[name] = largest[alike]
    return found


def distance(one: Summary, other: Summary, kind: RecordedKind) -> float:
    """Return the estimated norm of the difference of two tensors, divided by the first's norm.

    Of updates, the worst sixteenth of the rows or of the columns is left out: where Adam's second
    moment is nearly 0, a single element may differ by any amount.
    """
    norm = one.lines[:, 0].sum()
    if kind is not RecordedKind.update:
        return float(_root_share(_squares(one.lines, other.lines).sum(), norm))
    axes = ((one.lines, other.lines), (one.columns, other.columns))
    kept = []
    for left, right in axes:
        squares = np.sort(_squares(left, right))
        left_out = max(1, len(squares) // 16) if len(squares) >= LEAST_GROUPS else 0
        kept.append(squares[: len(squares) - left_out].sum())
    return float(_root_share(min(kept), norm))


def _squares(one: Numbers, other: Numbers) -> Numbers:
    """Return the estimated squared norm of the difference in each group; inf if that is NaN."""
    if one.shape != other.shape:
        return np.full(len(one), math.inf)
    found: Numbers = np.square(one[:, 1:] - other[:, 1:]).mean(1)
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    found[np.isnan(found)] = math.inf
    found[is_same.all(1)] = 0.0
    return found


def _root_share(squares: Any, norms: Any) -> Any:
    """Return the root of squares divided by squared norms; 0 of nothing is nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.sqrt(np.asarray(squares) / np.asarray(norms))
    return np.where(squares == 0, 0.0, np.where(np.isnan(found), math.inf, found))


def _ratio(one: Summary, other: Summary) -> float:
    was, now = (float(each.lines[:, 0].sum()) for each in (one, other))
    return math.sqrt(now / was) if was > 0 and now >= 0 else math.nan


def _relative(was: float, now: float) -> float:
    if was == now or (math.isnan(was) and math.isnan(now)):
        return 0.0
    found = abs(now - was) / abs(was) if was else math.inf
    return found if math.isfinite(found) else math.inf


def _located(
    found: TensorDifference, recorded: Recording, changed: Recording, head_dim: int | None
) -> TensorDifference:
    """Return the difference with the part of the tensor that it is limited to."""
    if found.kind == "loss":
        return found
    key = found.step, RecordedKind(found.kind), found.tensor
    one, other, sizes = recorded.summaries[key], changed.summaries[key], recorded.sizes
    axes = ("sample", "feature") if found.kind == RecordedKind.forward else ("row", "column")
    allowed = 2 * FACTOR * found.expected  # of a group: fewer elements, a worse estimate
    parts = [
        _part(
            axis,
            _root_share(_squares(left, right), left[:, 0]),
            size,
            allowed,
            head_dim,
            found.tensor,
        )
        for axis, left, right, size in zip(
            axes,
            (one.lines, one.columns),
            (other.lines, other.columns),
            sizes[found.tensor],
            strict=True,
        )
    ]
    where = ", ".join(part for part in parts if part)
    return TensorDifference(**{**asdict(found), "where": where})


def _part(
    axis: str, sizes: Numbers, whole: int, allowed: float, head_dim: int | None, name: str
) -> str:
    """Return the groups that differ, if they are few."""
    bad = np.flatnonzero(sizes > allowed)
    count = len(sizes)
    if not 0 < len(bad) <= count // 2:
        return ""
    low, high = int(bad[0]), int(bad[-1])
    if axis != "sample" and head_dim and "attn" in name and whole == count * head_dim:
        return _span("head", low, high)
    return _span(axis, -(-low * whole // count), -(-(high + 1) * whole // count) - 1)


def _span(what: str, low: int, high: int) -> str:
    return f"{what} {low}" if low == high else f"{what}s {low} to {high}"
