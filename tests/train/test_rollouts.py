"""Rollouts by the training engine: the same answers on every layout and in every batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completion_server import completion_server
from grpo_kills import sampling, write_prompts
from rank_processes import Case, tiny_config, tiny_plan, train_cases
from rollout_probe import ENDS, ROWS, SAMPLER, SETTINGS, Rollouts

from trainctl.config.registry import new_section
from trainctl.memory.budget import device_budget
from trainctl.plans.types import Batch, RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.rollouts import Completion

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one process": (1, {"zero_stage__stage": 0}),
    "ZeRO 2": (2, {"zero_stage__stage": 2}),
    "ZeRO 3": (2, {"zero_stage__stage": 3, "activation_checkpointing__mode": "full"}),
    "tensor ranks": (2, {"zero_stage__stage": 1, "parallelism__tensor": 2}),
    "fsdp2": (2, {"zero_stage__stage": 3, "engine__kind": "fsdp2"}),
}
OTHERS = {
    "a window": (1, {"model__family": "mistral", "model__sliding_window": 8}),
    "learned positions": (1, {"model__family": "gpt2", "model__num_key_value_heads": None}),
    "eager": (1, {"model__attention": "eager"}),
}
"""Models that have other answers."""
ALL = LAYOUTS | OTHERS


def plan_of(layout: str, **more: Any) -> RunPlan:
    processes, changes = ALL[layout]
    return tiny_plan(tiny_config(steps=2, sequence_length=32, **changes, **more), processes)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rollouts]:
    folder = tmp_path_factory.mktemp("rollouts")
    made = {}
    for layout, (processes, _) in ALL.items():
        case = Case(plan_of(layout), RunPaths(folder / layout))
        ranks = train_cases(processes, [case], probe="rollout_probe:rollouts")
        made[layout] = ranks[0][0]
        for (other,) in ranks[1:]:
            assert_same(other.answers, made[layout].answers, exactly=True)
    return made


def assert_same(answers: list[Completion], others: list[Completion], *, exactly: bool = False):
    for each, other in zip(answers, others, strict=True):
        assert each.ids.tolist() == other.ids.tolist()
        assert each.is_finished == other.is_finished
        limit = 0 if exactly else 1e-5
        assert np.abs(each.log_probabilities - other.log_probabilities).max() <= limit


@pytest.mark.parametrize("layout", ALL)
def test_answers_depend_on_neither_layout_nor_batch(layout: str, found: dict[str, Rollouts]):
    here = found[layout]
    if layout in LAYOUTS:
        assert_same(here.answers, found["one process"].answers)
    assert_same(here.others, here.answers)
    for answer, expected in zip(here.answers[::3], here.expected, strict=True):
        assert np.abs(answer.log_probabilities - expected).max() < 1e-5


def test_answers_end_at_an_end_or_are_cut(found: dict[str, Rollouts]) -> None:
    answers = found["one process"].answers
    assert len(answers) == len(ROWS)
    for each in answers:
        assert max(each.ids) < SETTINGS.vocab_size < 260
        assert each.is_finished == (each.ids[-1] in ENDS)
        assert not set(each.ids[:-1].tolist()) & set(ENDS)
        assert each.is_finished or len(each.ids) == SETTINGS.max_tokens
    assert {each.is_finished for each in answers} == {True, False}
    assert len({tuple(each.ids.tolist()) for each in answers}) > len(ROWS) / 2


def test_training_goes_on_as_without_rollouts(found: dict[str, Rollouts], tmp_path: Path) -> None:
    case = Case(plan_of("one process"), RunPaths(tmp_path))
    (expected,) = train_cases(1, [case], probe="rollout_probe:losses")
    for layout in LAYOUTS:
        assert found[layout].losses == pytest.approx(expected, rel=1e-6), layout


@pytest.mark.parametrize("layout", ["ZeRO 2", "ZeRO 3", "fsdp2", "tensor ranks"])
def test_a_rollout_takes_the_memory_that_the_budget_says(layout: str, tmp_path: Path) -> None:
    """Allocations while answers are generated against the phase `rollout`."""
    shape = {"intermediate_size": 512, "hidden_size": 128, "num_layers": 3}
    plan = plan_of(layout, **{f"model__{name}": size for name, size in shape.items()})
    (one, *_) = train_cases(2, [Case(plan, RunPaths(tmp_path))], probe="rollout_probe:memory")
    plan.config.objective = new_section(
        "objective",
        "grpo",
        max_prompt_tokens=max(len(row.prompt) for row in ROWS),
        max_answer_tokens=SETTINGS.max_tokens,
        top_p=SAMPLER.top_p,
    )
    rows = Batch(
        global_batch_size=len(ROWS),
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        sequence_length=32,
    )
    moments = device_budget(replace(plan, batch=rows)).worst_stage.moments
    moment, step = moments["rollout"], moments["step"]
    (found,) = one
    assert found.cache == moment.key_value_cache
    beyond = moment.gathered_parameters - step.gathered_parameters
    expected = moment.key_value_cache + moment.logits + moment.activations + beyond
    # The buffer of the last gather, and tensors of a pass, may be freed earlier than counted.
    assert 0.8 < found.peak / expected < 1.1


def test_a_server_generates_with_the_weights_of_each_step(tmp_path: Path) -> None:
    """The server is of our own (`tests/support/completion_server.py`), not vLLM."""
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    layouts = {
        "zero": {"zero_stage__stage": 3, "ema_decay": 0.9},
        "adapter": {"zero_stage__stage": 1, "adapter__kind": "lora", "adapter__rank": 4},
    }
    with completion_server() as server:
        cases = [
            Case(
                tiny_plan(
                    sampling(
                        prompts,
                        steps=3,
                        checkpoint__every_steps=None,
                        objective__rollout="vllm",
                        objective__rollout_url=server.url,
                        **changes,
                    ),
                    2,
                ),
                RunPaths(tmp_path / name),
            )
            for name, changes in layouts.items()
        ]
        train_cases(2, cases, together=True)
        sent = [path for path, _ in server.seen if path == "/collective_rpc"]
    # Before each step, and for the evaluation after the last, one of them with the average.
    assert len(sent) == 2 * (3 + 1) + 1
    for case in cases:
        steps = [each for each in read_events(case.run.events) if each["event"] == "step"]
        assert len(steps) == 3
        assert max(each["objective"]["mismatch"] for each in steps) < 1e-5
        assert not (case.run.root / "served").exists()
