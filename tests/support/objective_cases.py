"""A tiny model trained on each objective and layout; `scripts/parity_objectives.py` trains all."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from encoders import encoder, encoder_keys
from rank_processes import Case, tiny_config, train_cases

from trainctl.config.schema import Accelerator, RunConfig
from trainctl.hardware import Hardware
from trainctl.models.directory import ENCODERS
from trainctl.options.data import SampleKind
from trainctl.options.objective import objective_of
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.models.model import skeleton

RECORDS = 60


@dataclass(frozen=True)
class Layout:
    """Processes and settings of a column."""

    processes: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    compared_with: str = "1"


ADAPTER = {"adapter__kind": "lora", "adapter__rank": 4, "optimizer__lr": 1e-2}
"""An adapter starts as nothing: with the rate of the other layouts no loss would change."""
LAYOUTS: Mapping[str, Layout] = {
    "1": Layout(),
    "accumulation": Layout(1, {"training__micro_batch_size": 2}),
    "ZeRO 0": Layout(2),
    "ZeRO 1": Layout(2, {"zero_stage__stage": 1}),
    "ZeRO 2": Layout(2, {"zero_stage__stage": 2}),
    "ZeRO 3": Layout(2, {"zero_stage__stage": 3, "training__micro_batch_size": 2}),
    "DP 4": Layout(4, {"zero_stage__stage": 3}),
    "TP 2": Layout(2, {"zero_stage__stage": 1, "parallelism__tensor": 2}),
    "SP 2": Layout(2, {"zero_stage__stage": 1, "parallelism__sequence": 2}),
    "CP 2": Layout(2, {"zero_stage__stage": 1, "parallelism__context": 2}),
    "recomputed": Layout(2, {"zero_stage__stage": 3, "activation_checkpointing__mode": "full"}),
    "FSDP2": Layout(2, {"zero_stage__stage": 3, "engine__kind": "fsdp2"}),
    "LoRA at rest": Layout(1, {**ADAPTER, "optimizer__lr": 1e-12}, "LoRA at rest"),
    "LoRA alone": Layout(1, ADAPTER, "LoRA alone"),
    "LoRA": Layout(2, {"zero_stage__stage": 3, **ADAPTER}, "LoRA alone"),
}
"""Layouts by the name of their column. All have one global batch."""

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "next_token": {},
    "dpo": {},
    "simpo": {},
    "orpo": {},
    # More weight on good answers: then the baseline is above 0.
    "kto": {"objective__undesirable_weight": 0.2},
    "multi_token": {"objective__future_tokens": 2, "model__future_blocks": 2},
    "distill": {"objective__divergence": "jsd", "objective__label_weight": 0.2},
    "contrastive": {},
    "reward": {"objective__centering": 0.01},
    "process_reward": {},
    "classify": {"objective__outputs": 3, "objective__class_weights": [1.0, 2.0, 0.5]},
    "classify, several classes": {
        "objective__outputs": 3,
        "objective__problem": "multi_label_classification",
    },
    "classify, regression": {"objective__outputs": 1, "objective__problem": "regression"},
    "contrastive, symmetric": {
        "objective__symmetric": True,
        "objective__pooling": "last",
        "model__tie_word_embeddings": False,  # then the head has no gradient
    },
    "contrastive, bert": {"objective__pooling": "first"},
    "grpo": {
        "objective__samples": 4,
        "objective__max_prompt_tokens": 32,
        "objective__max_answer_tokens": 16,
        "objective__normalize_by": "tokens",
        "objective__updates": 2,
        # Half of an untrained model's answers have a digit.
        "objective__rewards": {"digit": {"kind": "regex", "pattern": "[0-9]", "whole": False}},
    },
    "masked, bert": {"data__mask_documents": True},
    "masked, modernbert": {"data__mask_documents": True},
}
"""Settings by the name of a row: the objective's kind, and what is special, such as an encoder."""


def _pair(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"about {a}"}


def _answer(a: int, b: int) -> dict[str, Any]:
    is_good = a % 3 > 0
    answer = f"{a + b}" if is_good else f"about {a}"
    return {"prompt": f"{a}+{b}=", "completion": answer, "label": is_good}


def _similar(a: int, b: int) -> dict[str, Any]:
    """Return a query with two negatives, of which every third has one."""
    negatives = [f"{a} less {b}", f"{b} and {b}"][: 1 + bool(a % 3)]
    return {"query": f"{a}+{b}", "positive": f"{b} more than {a}", "negatives": negatives}


def _labelled(a: int, b: int) -> dict[str, Any]:
    return {"text": f"{a}+{b}", "label": (a + b) % 3}


def _steps(a: int, b: int) -> dict[str, Any]:
    """Return an answer of two steps, of which every other second one is wrong."""
    steps = [f"{a}+{b}", f"{a + b + a % 2}"]
    return {"prompt": f"add {a} and {b}", "completions": steps, "labels": [True, a % 2 == 0]}


def _prompt(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "answer": a + b}


SOURCES: Mapping[SampleKind, tuple[str, Callable[[int, int], dict[str, Any]]]] = {
    SampleKind.pairs: ("preferences", _pair),
    SampleKind.answers: ("answers", _answer),
    SampleKind.similar: ("similar", _similar),
    SampleKind.labelled: ("labelled", _labelled),
    SampleKind.steps: ("steps", _steps),
    SampleKind.prompts: ("prompts", _prompt),
}
"""The data source of each kind of records, and a record about two numbers."""


def write_records(folder: Path, kind: SampleKind, count: int = RECORDS) -> Path:
    """Write records of a kind to a file."""
    dice, file = random.Random(3), folder / f"{kind.name}.jsonl"
    _, record = SOURCES[kind]
    rows = (
        record(dice.randrange(10 ** dice.randrange(1, 5)), dice.randrange(100))
        for _ in range(count)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _teacher(folder: Path) -> Path:
    """Write a model of another shape than the student's, with random weights."""
    if not (folder / "teacher").is_dir():
        shape = replace(tiny_config().model, hidden_size=96, num_layers=2, initializer_range=0.2)
        model = skeleton(shape, torch.float32)
        torch.manual_seed(1)
        type(model)(model.config).save_pretrained(folder / "teacher")
    return folder / "teacher"


def config_of(row: str, folder: Path, *, steps: int, **changes: Any) -> RunConfig:
    """Return the configuration of a row; records are written to the folder."""
    kind = row.partition(",")[0]
    settings = {
        "steps": steps,
        "sequence_length": 96,
        "evaluate_every_steps": steps,
        "sample_tokens": 0,
        "gradient_accumulation_steps": None,
        "optimizer__lr": 3e-4,
        "schedule__warmup_fraction": 0.0,
        "checkpoint__at_end": False,
        "zero_stage__stage": 0,
        "objective__kind": kind,
        "model__num_layers": 3,
    }
    takes = objective_of(tiny_config(objective__kind=kind).objective).takes
    if takes is not SampleKind.text:
        settings |= {
            "data__kind": SOURCES[takes][0],
            "data__paths": [str(write_records(folder, takes))],
            "data__held_out_fraction": 0.2,
            "data__mask_documents": True,
            "data__on_too_long": "drop",
            "data__packing": "best_fit",
            "data__max_bytes": None,
        }
    if kind == "distill":
        settings |= {"objective__teacher": str(_teacher(folder)), "data__max_bytes": 50_000}
    model_type = row.rpartition(", ")[2]
    if model_type in ENCODERS:
        settings |= encoder_keys(encoder(folder / model_type, model_type))
    settings |= OBJECTIVES.get(row, {})
    section = tiny_config(**settings).objective
    head = objective_of(section).head
    settings["model__score_outputs"] = None if head is None else head.outputs(section)
    return tiny_config(**{**settings, **changes})


def plan_on(layout: Layout, row: str, folder: Path, *, steps: int) -> RunPlan | None:
    """Return the plan of a row on a layout; None if it is refused."""
    config = config_of(row, folder, steps=steps, **layout.settings)
    hardware = Hardware(
        name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=layout.processes
    )
    return resolve(config, hardware).plan


Losses = dict[str, list[float]]
"""Losses of the steps and of the evaluations of a run, and mean rewards of sampled answers."""


def train_on(
    layouts: Iterable[str], row: str, folder: Path, *, steps: int
) -> dict[str, Losses | None]:
    """Train a row on layouts, those of one number of processes together; None where refused.

    Raises:
        RanksFailed: A rank failed.
    """
    cases: dict[str, Case] = {}
    found: dict[str, Losses | None] = dict.fromkeys(layouts)
    for name in found:
        plan = plan_on(LAYOUTS[name], row, folder, steps=steps)
        if plan is not None:
            cases[name] = Case(plan, RunPaths(folder / f"{row} {name}".replace(" ", "-")))
    for size in sorted({LAYOUTS[name].processes for name in cases}):
        together = [case for name, case in cases.items() if LAYOUTS[name].processes == size]
        train_cases(size, together, together=True)
    for name, case in cases.items():
        events = list(read_events(case.run.events))
        found[name] = {
            kind: [event["loss"] for event in events if event["event"] == kind]
            for kind in ("step", "evaluation")
        } | {
            "reward": [
                event["objective"]["reward"]
                for event in events
                if "reward" in (event.get("objective") or {})
            ]
        }
    return found


def difference(one: Losses, other: Losses) -> float:
    """Return the largest difference of two runs' losses; infinite if a reward differs at all."""
    if one["reward"] != other["reward"]:
        return math.inf
    return max(abs(a - b) for kind in one for a, b in zip(one[kind], other[kind], strict=True))
