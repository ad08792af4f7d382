"""Steps on sampled answers without an engine: what is told and kept while rewards take long."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import tiny_config, tiny_plan

from trainctl.config.registry import new_section, part_class
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.reward import RewardSection
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.plans.types import Batch
from trainctl.runs.layout import RunPaths
from trainctl.runs.rollouts import read_rollouts, reward_texts
from trainctl.train.callbacks.steps import StepRecords
from trainctl.train.rollouts import server
from trainctl.train.rollouts.steps import JudgedAnswer, RolloutData, RolloutPhase, _measures
from trainctl.train.step import Step, Stepper

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
        self.reasons: dict[str, str] = {}

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
    data._idle_steps, data._reasons = 0, {}
    data._generate = lambda rows, writer, beat: [fields() for _ in rows]
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
        data._judge(KEYS, {7: prompt("p")}, known, writer, step=0, beat=beats.append)
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


def test_speed_counts_the_rows_that_ran_and_not_the_longest_possible_ones() -> None:
    batch = Batch(
        global_batch_size=4,
        micro_batch_size=1,
        gradient_accumulation_steps=2,
        sequence_length=128,
    )
    lengths = {0: 3, 1: 40, 2: 5, 3: 5}
    data = data_of(SlowRewards(), [])
    data._phase = RolloutPhase(
        folder=Path("phase"),
        step=0,
        first_sample=0,
        extra_samples=0,
        global_batch_size=4,
        without_signal=0.0,
        answers=[
            JudgedAnswer.of(
                data._section,
                (0, sample),
                range(8),
                {"ids": np.ones(tokens, int), "is_finished": True, "rewards": {}},
            )
            for sample, tokens in lengths.items()
        ],
    )
    data._batches = SimpleNamespace(at=lambda step, first: (first, batch))
    session = data._session
    session.process = SimpleNamespace(is_first=False, device=torch.device("cpu"))
    session.plan = tiny_plan(tiny_config(steps=1, sequence_length=128), 2)
    for rank in (0, 1):  # the longest answer is that of rank 1
        session.mesh = SimpleNamespace(data=SimpleNamespace(size=2, index=rank))
        rows = data.take(0, 0)
        assert {each.input_ids.shape for each in rows} == {(1, 48)}
    records: list[dict[str, Any]] = []
    session.rollouts = data
    session.progress = SimpleNamespace(samples=4)
    session.engine = SimpleNamespace(
        learning_rates=list, times=SimpleNamespace(memory=None), loss_scale=None, was_skipped=False
    )
    step = Step(0.0, None, {}, 1.0, batch, 0)
    now: Any = SimpleNamespace(made=step, step_seconds=2.0, early_records=[])
    journal: Any = SimpleNamespace(record=lambda kind, **fields: records.append(fields))
    context: Any = SimpleNamespace(step=1, learning_rate=1.0, tokens=512, seconds={})
    StepRecords(session, now, journal).after_step(context)
    assert records[0]["tokens_per_second"] == 4 * 48 / 2
    assert records[0]["tokens"] == 4 * 128


def answers_of(*rewards: float | None) -> list[JudgedAnswer]:
    section = new_section("objective", "grpo", rewards={"own": reward_section()})
    kept = [{**fields(), "rewards": {"own": reward}} for reward in rewards]
    return [JudgedAnswer.of(section, (n // 2, n % 2), (1,), each) for n, each in enumerate(kept)]


def reward_section() -> Any:
    return part_class(RewardSection, "regex")(kind="regex", pattern="a")


NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ((NAN, NAN, NAN, NAN), "the reward own failed for every answer: ValueError: no"),
        ((NAN, None, NAN, NAN), "the reward own failed for every answer: ValueError: no"),
        ((1.0, 1.0, 0.0, 0.0), "all answers to each prompt had the same reward"),
        ((None, None, None, None), "all answers to each prompt had the same reward"),
    ],
)
def test_steps_without_a_signal_end_the_run_with_the_cause(rewards: Any, words: str) -> None:
    data = data_of(SlowRewards(), [])
    data._section = new_section(
        "objective", "grpo", rewards={"own": reward_section()}, samples=2, no_signal_steps=3
    )
    data._session.run = RunPaths(Path("runs/mine"))
    data._reasons = {"own": "ValueError: no"}
    for step in (1, 2):
        data._require_signal(step, answers_of(*rewards))
    data._require_signal(3, answers_of(0.0, 1.0, 0.0, NAN))  # one prompt has a signal
    for step in (4, 5):
        data._require_signal(step, answers_of(*rewards))
    with pytest.raises(TrainctlError) as caught:
        data._require_signal(6, answers_of(*rewards))
    assert f"nothing to learn from in 3 steps in a row: {words}" in caught.value.message
    assert "trainctl data show runs/mine --step 6" in caught.value.hint
    assert caught.value.exit_code is ExitCode.training_failed


def test_a_failed_reward_is_no_number_in_measures_and_kept_texts(tmp_path: Path) -> None:
    data = data_of(SlowRewards(), [])
    data._session.run = RunPaths(tmp_path)
    data._session.tokenizer = SimpleNamespace(decode=lambda ids, with_special=False: "text")
    data._answer_text = lambda fields: "text"
    answers = answers_of(1.0, NAN)
    measures = _measures(answers)
    assert measures["reward"] == measures["reward_own"] == 1.0 and measures["failed"] == 0.5
    assert "reward" not in _measures(answers_of(NAN, NAN))
    data._keep_texts(1, answers)
    assert [each["reward"] for each in read_rollouts(data._session.run, 1)] == [1.0, None]
    shown = [(each["rewards"], reward_texts(each)) for each in read_rollouts(data._session.run, 1)]
    assert shown == [({"own": 1.0}, {"own": "1"}), ({"own": None}, {"own": "failed"})]
