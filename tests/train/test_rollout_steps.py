"""Steps on sampled answers without an engine: what is told and kept while rewards take long."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainctl.config.registry import new_section
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.train.rollouts import server
from trainctl.train.rollouts.steps import RolloutData
from trainctl.train.step import Stepper

KEYS = [(7, sample) for sample in range(4)]
SECONDS = 0.05


class OneRank:
    """The only process of a run."""

    is_first = True

    def broadcast_from_first(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag


class SlowRewards:
    """Rewards that take a while for each answer, and then apply to none."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def score(self, answers: Any, *, step: int, keep: Any) -> list[dict[str, float | None]]:
        for place, answer in enumerate(answers):
            time.sleep(SECONDS)
            if place == self.fails_at:
                raise OSError("killed")
            keep(place, {"length": None if answer.prompt == "held out" else float(place)})
        return [{"length": None} for _ in answers]


def data_of(rewards: SlowRewards, beats: list[str]) -> Any:
    held_out = SimpleNamespace(num_samples=4, prompt=lambda index: prompt("held out"))
    data: Any = object.__new__(RolloutData)
    data._session = SimpleNamespace(
        process=OneRank(),
        engine=SimpleNamespace(times=SimpleNamespace(host_part=lambda name: nullcontext())),
        tokenizer=SimpleNamespace(decode=lambda ids: "text"),
        held_out={SINGLE_SOURCE: held_out},
        progress=SimpleNamespace(step=3),
    )
    data._journal = SimpleNamespace(beat=lambda phase, doing: beats.append(doing))
    data._section, data._rewards = new_section("objective", "grpo"), rewards
    data._generate = lambda rows, writer: [fields() for _ in rows]
    return data


def prompt(text: str) -> Any:
    return SimpleNamespace(text=text, columns={}, ids=(1, 2))


def fields() -> dict[str, Any]:
    return {"ids": np.array([1, 2]), "is_finished": True}


def test_rewards_that_take_long_are_kept_one_by_one_and_the_run_shows_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", SECONDS / 5)
    beats: list[str] = []
    kept: list[Any] = []
    writer: Any = SimpleNamespace(add=lambda key, rewards: kept.append((key, rewards)))
    known = {key: fields() for key in KEYS}
    data = data_of(SlowRewards(fails_at=2), beats)
    with pytest.raises(Exception, match="killed"):
        data._judge(KEYS, {7: prompt("p")}, known, writer, step=0)
    assert kept == [(KEYS[0], {"length": 0.0}), (KEYS[1], {"length": 1.0})]
    assert len(beats) > 5 and set(beats) == {"judging 4 answers"}


def test_an_evaluation_without_a_reward_that_applies_is_none() -> None:
    assert data_of(SlowRewards(), []).evaluate(4) is None


def test_a_batch_that_is_passed_over_takes_its_replaced_prompts_with_it() -> None:
    stepper: Any = object.__new__(Stepper)
    progress, batch = SimpleNamespace(samples=32), SimpleNamespace(global_batch_size=16)
    for rollouts, end in ((None, 48), (SimpleNamespace(extra_samples=8), 56)):
        stepper._session = SimpleNamespace(rollouts=rollouts, progress=progress)
        assert stepper._end_of(batch) == end
