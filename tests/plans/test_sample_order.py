"""Tests of the sample order that a resume announces against the samples it draws."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from plain_order import sample_indices
from plan_cases import config_with, cpus

from trainctl.config.registry import new_section, part_class
from trainctl.config.schema import OnTooLong, SourceConfig
from trainctl.plans.mixture import changes_of_order, changes_overlong_handling, samples_in
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve

TOKENS, DRAWN = 10_001, 90


def plan_with(**changes: object) -> RunPlan:
    changes = {"training__sequence_length": 100, "training__global_batch_size": 10, **changes}
    plan = resolve(config_with(**changes), cpus(1)).plan
    assert plan is not None
    return plan


def said(now: RunPlan, before: RunPlan | None = None, samples: int = DRAWN) -> str:
    return "; ".join(changes_of_order(before or plan_with(), now, samples, TOKENS))


def test_what_changes_nothing_says_nothing() -> None:
    assert said(plan_with()) == ""
    assert said(plan_with(training__global_batch_size=5)) == "", "the count is of samples"
    assert said(plan_with(training__sequence_length=200), samples=0) == ""
    # Without shuffling the seed draws nothing.
    in_order = plan_with(data__shuffle=False)
    assert said(replace_seed(in_order), in_order) == ""


def test_another_packing_is_reported() -> None:
    text = said(plan_with(data__packing="best_fit"))
    assert "data.packing=best_fit makes other samples" in text and "held-out losses" in text


def test_other_conversations_are_reported() -> None:
    chats = {"data__kind": "chat", "data__paths": ["a.jsonl"], "data__packing": "best_fit"}
    cuts, drops, refuses = (
        plan_with(**chats, data__on_too_long=rule) for rule in ("cut", "drop", "error")
    )
    assert "data.on_too_long=drop packs other conversations" in said(drops, cuts)
    assert said(refuses, drops) == "", "what was left out would be an error"
    assert said(plan_with(data__on_too_long="drop")) == "", "there are none"
    mixed = {
        kind: part_class(SourceConfig, kind)(kind=kind, weight=1.0) for kind in ("chat", "stdlib")
    }
    sources = new_section("data", "stdlib", sources=mixed)
    assert changes_overlong_handling(sources, replace(sources, on_too_long=OnTooLong.drop))


def replace_seed(plan: RunPlan) -> RunPlan:
    training = replace(plan.config.training, seed=plan.config.training.seed + 1)
    return replace(plan, config=replace(plan.config, training=training))


def test_another_length_moves_the_place_in_the_pass() -> None:
    text = said(plan_with(training__sequence_length=200))
    assert "cuts the text into 50 samples, and 100 cut it into 100" in text
    assert "was to be number 91 of pass 1, and is number 41 of pass 2" in text
    assert "an order of their own" in text and "held-out losses" in text
    # True of the order that is drawn: the rest of the first pass is never trained on.
    counters = np.arange(DRAWN)
    seed = plan_with().config.training.seed
    old = sample_indices(counters, num_samples=100, seed=seed, shuffle=True)
    new = sample_indices(np.arange(DRAWN, 100), num_samples=50, seed=seed, shuffle=True)
    seen = {token for index in old for token in range(index * 100, index * 100 + 100)}
    again = {token for index in new for token in range(index * 200, index * 200 + 200)}
    assert again & seen, "some is seen again"
    assert set(range(10_000)) - seen - again, "some is left out"


@pytest.mark.parametrize(("length", "begins"), [(200, 8_000), (50, 4_500)])
def test_text_in_its_own_order_goes_on_at_another_token(length: int, begins: int) -> None:
    before = plan_with(data__shuffle=False)
    text = said(plan_with(data__shuffle=False, training__sequence_length=length), before)
    match = re.search(r"begins at token ([\d,]+) of the text, and was to begin at 9,000", text)
    assert match is not None and int(match[1].replace(",", "")) == begins
    (index,) = sample_indices(
        np.array([DRAWN]), num_samples=samples_in(TOKENS, length), seed=0, shuffle=False
    )
    assert index * length == begins


def test_another_seed_and_another_shuffle_order_the_rest_anew() -> None:
    before = plan_with()
    assert "draws what follows in another order" in said(replace_seed(before))
    assert "takes what follows as the text has it" in said(plan_with(data__shuffle=False))
    in_order = plan_with(data__shuffle=False)
    assert "takes what follows at random" in said(before, in_order)
