"""Types, ranges and suggestions."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainctl.config.keys import (
    ValueProblem,
    convert_value,
    find_leaf,
    leaves,
    range_problem,
    sections,
)
from trainctl.config.schema import GROUPS
from trainctl.config.suggest import OTHER_NAMES, nearest_keys, nearest_names

NUMBERS = st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=True))


def test_every_default_is_a_legal_value_of_its_key() -> None:
    for leaf in leaves().values():
        assert convert_value(leaf, leaf.default) == leaf.default


def test_sections_are_the_groups_and_training() -> None:
    assert sections() == {*GROUPS, "training"}


def test_a_free_form_mapping_owns_the_keys_inside_it() -> None:
    assert find_leaf(("deepspeed", "a", "b")) == leaves()["deepspeed"]
    assert find_leaf(("optimizer", "lr", "x")) is None
    assert find_leaf(("optimizer.lr",)) is None


@given(st.sampled_from(sorted(leaves())), NUMBERS)
def test_a_number_that_is_accepted_is_finite_and_in_range(key: str, number: float) -> None:
    leaf = leaves()[key]
    try:
        accepted = convert_value(leaf, number)
    except ValueProblem as problem:
        assert problem.message
        return
    if isinstance(accepted, (int, float)):
        nearest = float(number) if isinstance(accepted, float) else number
        assert accepted == nearest and math.isfinite(accepted)
        least, most, above = (leaf.metadata[name] for name in ("minimum", "maximum", "above"))
        assert least is None or accepted >= least
        assert most is None or accepted <= most
        assert above is None or accepted > above


@given(st.floats(-10, 10), st.floats(-5, 0), st.floats(0, 5))
def test_a_range_names_the_nearest_legal_value(value: float, least: float, most: float) -> None:
    problem = range_problem({"minimum": least, "maximum": most}, value)
    assert (problem is None) == (least <= value <= most)


COUNTED = "or with k, M, B or T behind it"
TIMED = "or with s, min, h or d behind it"


@pytest.mark.parametrize(
    ("key", "written", "hint"),
    [
        ("training.steps", "1.5 million", "write 1500000 (optimizer steps)"),
        ("training.steps", "5", "write 5 (optimizer steps)"),
        ("training.steps", "", f"give a whole number, in optimizer steps, {COUNTED}, or null"),
        ("training.steps", "1.0005k", "write 1000"),
        ("training.tokens", "1 Billion", "write 1000000000 (tokens)"),
        ("training.time_limit_minutes", "4 hours", "write 240 (minutes)"),
        ("training.time_limit_minutes", "4x", f"give a number, in minutes, {TIMED}, or null"),
        ("launcher.grace_seconds", "2 minutes", "write 120 (seconds)"),
        ("hardware.device_memory_bytes", "80G", "write 80000000000 (bytes)"),
        ("checkpoint.keep", "", "give a whole number"),
        ("model.num_layers", "3k", "write 3000"),
        ("model.num_layers", "3M", "give a whole number"),  # out of range
        ("optimizer.lr", "3m", "give a number, such as 0.1 or 1e-4"),  # no three million
        ("hardware.network_gb_per_second", "50G", "give a number, in GB/s, or null"),
        ("gradients.adaptive_percentile", "5k", "give a number, in percent"),
        ("optimizer.lr", "high", "give a number, such as 0.1 or 1e-4"),
        ("optimizer.lr", math.inf, "give a number, such as 0.1 or 1e-4"),
    ],
)
def test_a_number_of_another_form_is_reported_in_the_keys_unit(
    key: str, written: str | float, hint: str
) -> None:
    with pytest.raises(ValueProblem) as caught:
        convert_value(leaves()[key], written)
    assert caught.value.hint == hint


def test_every_example_is_a_legal_value_of_its_key() -> None:
    with_example = [leaf for leaf in leaves().values() if leaf.metadata["example"]]
    assert len(with_example) >= 5
    for leaf in with_example:
        assert convert_value(leaf, yaml.safe_load(leaf.metadata["example"]))


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("optimizer.lr", 0.0, ""),
        ("optimizer.beta1", 1.0, "0.999999"),
        ("training.steps", -1, ""),
    ],
)
def test_a_number_out_of_its_range_is_found(key: str, value: float, hint: str) -> None:
    problem = range_problem(leaves()[key].metadata, value)
    assert problem is not None
    assert problem.out_of_range
    assert hint in problem.hint


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
        ("data.path", "data.paths"),
        ("training.n_layer", "model.num_layers"),
        ("sequence_lenght", "training.sequence_length"),
        ("offlaod", "offload"),
    ],
)
def test_the_first_suggestion_is_what_was_meant(typed: str, meant: str) -> None:
    assert nearest_keys(typed, leaves(), GROUPS)[0] == meant


@given(st.text(max_size=300))
def test_suggestions_never_fail_and_are_few(typed: str) -> None:
    assert len(nearest_keys(typed, leaves(), GROUPS)) <= 3
    assert len(nearest_names(typed, GROUPS)) <= 3
