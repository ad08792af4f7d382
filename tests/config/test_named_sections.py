"""Sections under names of the user's: removed, and replaced as a whole."""

from __future__ import annotations

import pytest

from trainctl.config.compose import compose
from trainctl.errors import TrainctlError

NEW = "objective.rewards.new={kind: length, most_tokens: 5}"


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (["~objective.rewards.format", NEW], {"new": "length"}),
        (["objective.rewards.format=null", NEW], {"new": "length"}),
        (["objective.rewards={new: {kind: length, most_tokens: 5}}"], {"new": "length"}),
        (["objective.rewards.format={kind: length, most_tokens: 5}"], {"format": "length"}),
        (["objective.rewards.format.weight=0.5", NEW], {"format": "regex", "new": "length"}),
        ([NEW], {"format": "regex", "new": "length"}),
    ],
)
def test_an_inherited_section_is_removed_or_replaced(
    overrides: list[str], kinds: dict[str, str]
) -> None:
    config = compose(["recipe=grpo-tiny", *overrides]).config
    rewards = config.objective.rewards  # type: ignore[attr-defined]
    assert {name: each.kind for name, each in rewards.items()} == kinds


def test_sources_are_removed_as_rewards_are() -> None:
    both = "data.sources={a: {kind: stdlib}, b: {kind: stdlib}}"
    config = compose(["recipe=tiny", both, "~data.sources.a"]).config
    assert list(config.data.sources) == ["b"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("~objective.rewards.formt", "did you mean ~objective.rewards.format?"),
        ("~objective.rewards", "a key cannot be deleted"),
        ("~objective.rewards.format.pattern", "a key cannot be deleted"),
    ],
)
def test_what_is_not_there_cannot_be_removed(override: str, words: str) -> None:
    with pytest.raises(TrainctlError) as caught:
        compose(["recipe=grpo-tiny", override])
    assert words in f"{caught.value.findings[0].message} {caught.value.findings[0].hint}"
