"""Learning rates of imports beside the formulas of the programs that are not installed."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, cos, exp, pi, sqrt
from pathlib import Path
from typing import Any

import pytest

from trainctl.config.compose import compose_leniently
from trainctl.migration.configs.import_table import import_document
from trainctl.migration.configs.tables import load_table
from trainctl.plans.schedule import Curve, decay_length, warmup_length
from trainctl.plans.types import Batch, Batches

STEPS, WARMUP = 40, 10
BATCHES = Batches.of(
    (),
    Batch(
        global_batch_size=1, micro_batch_size=1, gradient_accumulation_steps=1, sequence_length=1
    ),
)
Rate = Callable[[int], float]
"""Factor of the peak rate in an update, from 0."""


def rates_of_import(tool: str, document: dict[str, Any]) -> list[float]:
    found = import_document(load_table(tool), document, folder=Path())
    composed = compose_leniently([x for x in found.overrides if x.startswith("schedule")])
    assert not composed.has_error
    section = composed.config.schedule
    curve = Curve(
        config=section,
        batches=BATCHES,
        total_steps=STEPS,
        warmup_steps=warmup_length(section, STEPS, BATCHES)[0],
        decay_steps=decay_length(section, STEPS, BATCHES)[0],
    )
    return [curve.factor(step) for step in range(STEPS)]


def after(rate: Rate, warmup: int = WARMUP) -> Rate:
    """Return a curve after torch's linear warmup, which begins at 0 (LambdaLR)."""
    return lambda step: step / warmup if step < warmup else rate(step)


def share(step: int, warmup: int = WARMUP) -> float:
    """Return the share of the decay that is over before an update."""
    return (step - warmup) / (STEPS - warmup)


def half_cosine(way: float) -> float:
    return (1 + cos(pi * way)) / 2


def titan(decay: int, shape: Rate, lowest: float = 0.0) -> Rate:
    """Return torchtitan's curve: the warmup begins above 0, and a virtual step follows the last."""

    def rate(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        way = (step + 1 - (STEPS + 1 - decay)) / decay
        return 1.0 if way < 0 else lowest + (1 - lowest) * shape(way)

    return rate


HF = {"max_steps": STEPS, "warmup_steps": WARMUP, "learning_rate": 1e-3}
NEOX = {"train_iters": STEPS, "warmup": WARMUP / STEPS, "optimizer": {"params": {"lr": 1e-3}}}
TITAN = {"training": {"steps": STEPS}, "model": {"name": "llama3", "flavor": "8B"}}
RATIO = {"max_steps": STEPS, "learning_rate": 1e-3, "warmup_ratio": 0.03}
TABLE: list[tuple[str, dict[str, Any], Rate]] = [
    ("trl", HF, after(lambda s: 1 - share(s))),
    ("llama_factory", HF | {"lr_scheduler_type": "cosine"}, after(lambda s: half_cosine(share(s)))),
    (
        "llama_factory",
        RATIO,
        after(lambda s: 1 - share(s, ceil(0.03 * STEPS)), ceil(0.03 * STEPS)),
    ),
    (
        "axolotl",
        HF | {"cosine_min_lr_ratio": 0.2},
        after(lambda s: 0.2 + 0.8 * half_cosine(share(s))),
    ),
    ("axolotl", HF | {"lr_scheduler": "linear"}, after(lambda s: 1 - share(s))),
    (
        "openrlhf",
        {"adam": {"lr": 1e-3}, "lr_warmup_ratio": WARMUP / STEPS},
        after(lambda s: 0.1 + 0.9 * half_cosine(share(s))),
    ),
    ("gpt_neox", NEOX, after(lambda s: 1 - share(s))),
    (
        "gpt_neox",
        NEOX | {"lr_decay_style": "cosine", "min_lr": 1e-4},
        after(lambda s: 0.1 + 0.9 * half_cosine(share(s))),
    ),
    (
        "gpt_neox",
        NEOX | {"lr_decay_style": "exponential"},
        after(lambda s: exp(-0.693 * share(s))),
    ),
    (
        "torchtitan",
        TITAN | {"lr_scheduler": {"warmup_steps": WARMUP, "min_lr_factor": 0.1}},
        titan(STEPS - WARMUP, lambda way: 1 - way, 0.1),
    ),
    (
        "torchtitan",
        TITAN | {"lr_scheduler": {"warmup_steps": WARMUP, "decay_type": "sqrt"}},
        titan(STEPS - WARMUP, lambda way: 1 - sqrt(way)),
    ),
    (
        "torchtitan",
        TITAN
        | {"lr_scheduler": {"warmup_steps": WARMUP, "decay_ratio": 0.2, "decay_type": "cosine"}},
        titan(STEPS // 5, half_cosine),
    ),
]


@pytest.mark.parametrize(("tool", "document", "rate"), TABLE)
def test_an_import_has_the_rates_of_its_program(tool, document, rate):
    expected = [rate(step) for step in range(STEPS)]
    assert rates_of_import(tool, document) == pytest.approx(expected, abs=1e-9)


def test_curves_that_differ_are_said():
    for tool, document, key in (
        ("trl", {"lr_scheduler_type": "cosine_warmup_with_min_lr"}, "lr_scheduler_type"),
        (
            "trl",
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 7}},
            "lr_scheduler_type",
        ),
        (
            "trl",
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 9, "min_lr_ratio": 0.1},
            },
            "lr_scheduler_type",
        ),
        ("gpt_neox", NEOX | {"lr_decay_style": "exponential", "min_lr": 8e-4}, "min_lr"),
    ):
        found = import_document(load_table(tool), HF | document, folder=Path())
        assert key in {each.key for each in found.left_out}
