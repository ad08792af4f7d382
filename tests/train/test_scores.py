"""Objectives with a head of their own: one curve on every layout, and transformers' own classes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

LENGTH, PAIRS = 64, 40
ADAPTER = {"adapter__kind": "lora", "adapter__rank": 4}
RECORDS = {
    "steps": 6,
    "sequence_length": LENGTH,
    "evaluate_every_steps": 3,
    "precision__compute": "fp32",
    "optimizer__lr": 3e-3,
    "schedule__warmup_fraction": 0.0,
    "data__held_out_fraction": 0.2,
    "data__mask_documents": True,
    "data__on_too_long": "drop",
    "data__packing": "best_fit",
    "data__max_bytes": None,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, the right one preferred; half of them by a margin."""
    dice, file = random.Random(3), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = []
    for number in range(PAIRS):
        a, b = dice.randrange(10 ** dice.randrange(1, 5)), dice.randrange(100)
        row = {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"about {a}"}
        rows.append(row | ({"margin": dice.random()} if number % 2 else {}))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rewarding(pairs: Path, **changes):
    """Build a tiny configuration of a reward model."""
    here = {
        "objective__kind": "reward",
        "objective__centering": 0.01,
        "model__score_outputs": 1,
        "data__kind": "preferences",
        "data__paths": [str(pairs)],
    }
    return tiny_config(**RECORDS, **here, **changes)


def records(run: RunPaths, kind: str) -> list[dict]:
    return [each for each in read_events(run.events) if each["event"] == kind]


@pytest.mark.slow
def test_every_layout_has_one_curve_and_a_run_goes_on_elsewhere(pairs, tmp_path):
    layouts = {
        "alone": (1, {"zero_stage__stage": 0}),
        "zero 1": (2, {"zero_stage__stage": 1}),
        "zero 3": (2, {"zero_stage__stage": 3, "activation_checkpointing__mode": "full"}),
        "tensor": (2, {"zero_stage__stage": 2, "parallelism__tensor": 2}),
        "adapter alone": (1, {"zero_stage__stage": 0, **ADAPTER}),
        "adapter, zero 3": (2, {"zero_stage__stage": 3, **ADAPTER}),
    }
    plans = {
        name: tiny_plan(rewarding(pairs, **changes), processes)
        for name, (processes, changes) in layouts.items()
    }
    runs = {name: RunPaths(tmp_path / name) for name in layouts}
    resumed = RunPaths(tmp_path / "resumed")
    for size in (1, 2):
        here = [name for name, (processes, _) in layouts.items() if processes == size]
        cases = [Case(plans[name], runs[name]) for name in here]
        cases += [Case(with_stop(plans["zero 3"], 3), resumed)] if size == 2 else []
        train_cases(size, cases, together=True)
    train_cases(1, [Case(plans["alone"], resumed, 2)])
    for name in (*layouts, "resumed"):
        run = resumed if name == "resumed" else runs[name]
        alone = runs["adapter alone" if name.startswith("adapter") else "alone"]
        for kind in ("step", "evaluation"):
            for one, other in zip(records(run, kind), records(alone, kind), strict=True):
                assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), (name, kind)
                assert one["objective"] == pytest.approx(other["objective"], abs=2e-5), name
        for step, (_, norm) in curve(alone).items():
            assert curve(run)[step][1] == pytest.approx(norm, rel=1e-4), (name, step)
    last = records(runs["alone"], "step")[-1]
    assert last["loss"] < 0.6 and last["objective"]["accuracy"] == 1
