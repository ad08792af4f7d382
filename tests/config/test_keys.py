"""Types, ranges and suggestions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.config.check import check_ranges
from trainctl.config.keys import ValueProblem, accept, leaf_of, leaves, range_problem, sections
from trainctl.config.schema import GROUPS, RunConfig
from trainctl.config.suggest import OTHER_NAMES, nearest, nearest_keys

NUMBERS = st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=True))


def test_every_default_is_a_legal_value_of_its_key() -> None:
    for leaf in leaves().values():
        assert accept(leaf, leaf.default) == leaf.default


def test_sections_are_the_groups_and_training() -> None:
    assert sections() == {*GROUPS, "training"}


def test_a_free_form_mapping_owns_the_keys_inside_it() -> None:
    assert leaf_of(("deepspeed", "a", "b")) == leaves()["deepspeed"]
    assert leaf_of(("optimizer", "lr", "x")) is None
    assert leaf_of(("optimizer.lr",)) is None


@settings(deadline=None)
@given(st.sampled_from(sorted(leaves())), NUMBERS)
def test_a_number_that_is_accepted_is_finite_and_in_range(key: str, number: float) -> None:
    leaf = leaves()[key]
    try:
        accepted = accept(leaf, number)
    except ValueProblem as problem:
        assert problem.message
        return
    if isinstance(accepted, (int, float)):
        assert accepted == number and math.isfinite(accepted)
        least, most, above = (leaf.metadata[name] for name in ("minimum", "maximum", "above"))
        assert least is None or accepted >= least
        assert most is None or accepted <= most
        assert above is None or accepted > above


@settings(deadline=None)
@given(st.floats(-10, 10), st.floats(-5, 0), st.floats(0, 5))
def test_a_range_names_the_nearest_legal_value(value: float, least: float, most: float) -> None:
    problem = range_problem({"minimum": least, "maximum": most}, value)
    assert (problem is None) == (least <= value <= most)


def test_check_ranges_finds_every_number_out_of_range() -> None:
    config = RunConfig()
    assert check_ranges(config) == []
    config.optimizer = replace(config.optimizer, lr=0.0, beta1=1.0)
    config.training = replace(config.training, steps=-1)
    found = check_ranges(config)
    assert [finding.key for finding in found] == [
        "optimizer.lr",
        "optimizer.beta1",
        "training.steps",
    ]
    assert "0.999999" in found[1].hint


def test_other_trainers_names_point_to_keys_that_exist() -> None:
    for name, ours in OTHER_NAMES.items():
        assert ours in leaves() or ours in GROUPS, name
        assert name not in leaves()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "optimizer.lr"),
        ("Optimizer.LR", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("training.n_layer", "model.num_layers"),
        ("sequence_lenght", "training.sequence_length"),
        ("offlaod", "offload"),
    ],
)
def test_the_first_suggestion_is_what_was_meant(typed: str, meant: str) -> None:
    assert nearest_keys(typed, leaves(), GROUPS)[0] == meant


@settings(deadline=None)
@given(st.text(max_size=300))
def test_suggestions_never_fail_and_are_few(typed: str) -> None:
    assert len(nearest_keys(typed, leaves(), GROUPS)) <= 3
    assert len(nearest(typed, GROUPS)) <= 3
