"""Verdicts on recordings that are made up: estimates, order, values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from trainctl.launchers.comparison import Comparison, Verdict, compare, distance
from trainctl.runs.recording import RecordedKind, Recording, Summary, signs

UNIT = 2.0**-23
LAYERS = ("model.embed_tokens", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
RANDOM = np.random.default_rng(7)
TENSORS = {name: RANDOM.normal(size=(16, 32)) for name in LAYERS}


def summary(matrix: np.ndarray) -> Summary:
    rows, columns = (signs(size, axis) for size, axis in zip(matrix.shape, "rc", strict=True))
    signed = rows[:, :, None] * columns[:, None] * matrix
    sums = np.concatenate((np.square(matrix)[None], signed))
    lines, cells = sums.sum(2).T, sums.sum(1).T
    return Summary(lines.reshape(4, 4, -1).sum(1), cells.reshape(4, 8, -1).sum(1))


def recording(
    changes: Mapping[tuple[RecordedKind, str], np.ndarray] | None = None, loss: float = 5.0
) -> Recording:
    found = Recording(order=list(LAYERS), losses={1: loss})
    for kind in RecordedKind:
        for layer, matrix in TENSORS.items():
            name = layer if kind is RecordedKind.forward else f"{layer}.weight"
            matrix = (changes or {}).get((kind, layer), matrix)
            found.summaries[1, kind, name] = summary(matrix)
            found.sizes[name] = (16, 32)
    return found


def compared(changed: Recording) -> Comparison:
    base = recording()
    noisy = {
        (kind, name): matrix * (1 + 1e-7 * RANDOM.normal(size=matrix.shape))
        for kind in RecordedKind
        for name, matrix in TENSORS.items()
    }
    pairs = [(base, recording(noisy))]
    return compare(base, changed, pairs, unit=UNIT, head_dim=None, tokens=100)


def test_the_norm_of_a_difference_is_estimated_without_bias() -> None:
    matrix = TENSORS[LAYERS[0]]
    found = []
    for _ in range(300):
        noise = RANDOM.normal(size=matrix.shape) * 1e-3
        exact = np.linalg.norm(noise) / np.linalg.norm(matrix)
        of = distance(summary(matrix), summary(matrix + noise), RecordedKind.forward)
        found.append((of / exact) ** 2)
    assert np.mean(found) == pytest.approx(1, abs=0.1)


def test_the_first_difference_is_the_first_in_the_order_of_computation() -> None:
    forward, gradient, update = RecordedKind
    wrong = {name: matrix * 1.01 for name, matrix in TENSORS.items()}
    for kinds, loss, kind, name in (
        ((forward, gradient, update), 5.0, "forward", LAYERS[0]),
        ((gradient, update), 5.01, "loss", ""),
        ((gradient, update), 5.0, "gradient", f"{LAYERS[2]}.weight"),
        ((update,), 5.0, "update", f"{LAYERS[2]}.weight"),
    ):
        changes = {(each, layer): wrong[layer] for each in kinds for layer in LAYERS}
        found = compared(recording(changes, loss))
        assert found.verdict is Verdict.differs and found.first is not None
        assert (found.first.kind, found.first.tensor) == (kind, name)
    assert compared(recording()).verdict is Verdict.equal
    assert compared(recording(loss=5.0 + 1e-7)).verdict is Verdict.within_rounding


def test_a_part_that_alone_differs_is_named() -> None:
    matrix = TENSORS[LAYERS[1]].copy()
    matrix[:, 8:16] *= 1.01
    first = compared(recording({(RecordedKind.forward, LAYERS[1]): matrix})).first
    assert first is not None and first.where == "features 8 to 15" and first.layer == 0


def test_one_wild_row_of_an_update_is_rounding_and_one_of_a_gradient_is_not() -> None:
    matrix = TENSORS[LAYERS[1]].copy()
    matrix[3] *= 2
    wild = {kind: recording({(kind, LAYERS[1]): matrix}) for kind in RecordedKind}
    assert compared(wild[RecordedKind.update]).verdict is Verdict.within_rounding
    assert compared(wild[RecordedKind.gradient]).verdict is Verdict.differs


def test_values_that_are_not_finite_differ_from_others_and_equal_themselves() -> None:
    matrix = TENSORS[LAYERS[1]].copy()
    matrix[0, 0] = math.nan
    broken = recording({(RecordedKind.gradient, LAYERS[1]): matrix})
    found = compared(broken)
    assert found.first is not None and found.first.size == math.inf
    pairs = [(broken, broken)]
    again = compare(broken, broken, pairs, unit=UNIT, head_dim=None, tokens=100)
    assert again.verdict is Verdict.equal


def test_signs_are_the_same_on_every_machine() -> None:
    assert signs(8, "row")[0].tolist() == [1, -1, -1, 1, 1, 1, -1, 1]
