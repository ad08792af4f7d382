"""Expansion of sweeps: Hydra's grammar, every combination, no value changed."""

from __future__ import annotations

import pytest

from trainctl.config.compose import compose
from trainctl.config.overrides import expand_sweep
from trainctl.errors import TrainctlError


def test_every_combination_first_key_slowest() -> None:
    points = expand_sweep(["recipe=tiny", "optimizer.lr=1e-4,3e-4", "schedule=cosine,linear"])
    assert [tuple(point.values.values()) for point in points] == [
        ("0.0001", "cosine"),
        ("0.0001", "linear"),
        ("0.0003", "cosine"),
        ("0.0003", "linear"),
    ]
    assert points[1].overrides == ("recipe=tiny", "optimizer.lr=0.0001", "schedule=linear")
    assert list(points[0].values) == ["optimizer.lr", "schedule"]


def test_each_point_composes_to_its_values() -> None:
    points = expand_sweep(["recipe=tiny", "training.seed=range(1,4)"])
    seeds = [compose(point.overrides).config.training.seed for point in points]
    assert seeds == [1, 2, 3]


@pytest.mark.parametrize("value", ['"a, b"', "'$(id)'", '"it\'s"', '"x\\"y"'])
def test_quoted_values_stay_one_value(value: str) -> None:
    (one,) = expand_sweep([f"training.sample_prompt={value}"])
    assert one.values == {}
    two = expand_sweep([f"training.sample_prompt={value},plain"])
    prompts = [compose(point.overrides).config.training.sample_prompt for point in two]
    assert prompts == [compose(one.overrides).config.training.sample_prompt, "plain"]


def test_lists_are_no_sweep() -> None:
    (one,) = expand_sweep(["logging.profile_steps=[1,2]", "~x", "nonsense"])
    assert one.overrides == ("logging.profile_steps=[1,2]", "~x", "nonsense")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer.lr=interval(0,1)", "interval"),
        ("training.seed=range(1,5000)", "4,999 runs"),
    ],
)
def test_what_cannot_be_listed_is_refused(text: str, words: str) -> None:
    with pytest.raises(TrainctlError) as caught:
        expand_sweep([text])
    told = [caught.value.message, *(finding.message for finding in caught.value.findings)]
    assert words in " ".join(told)
