"""Kills of runs that sample their data: in a rollout, while answers are judged, around an update.

A trial trains one run to its end through three SIGKILLs, each at a random event of one phase, and
compares it with the same run without kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from ranks import train_case

from trainctl.engines.process import Process
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.rollouts import AnswerWriter, read_answers, step_of
from trainctl.train.step import Stepper

PHASES = ("rollout", "reward", "update")
STEPS, SAMPLES, BATCH = 6, 4, 16
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 1": (2, {"zero_stage__stage": 1, "objective__updates": 2}),
    "zero 3": (2, {"zero_stage__stage": 3, "objective__dynamic_sampling": 2}),
    "tensor": (2, {"zero_stage__stage": 1, "parallelism__tensor": 2}),
}
_ORDER = "kill.json"

Curve = dict[int, tuple[float, float]]


def write_prompts(file: Path, count: int = 60) -> Path:
    """Write prompts of sums."""
    dice = random.Random(1)
    rows = [f"{dice.randrange(100)}+{dice.randrange(10)}=" for _ in range(count)]
    file.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return file


def sampling(prompts: Path, **changes: Any) -> Any:
    """Build a tiny configuration that trains by GRPO on rewards of a short answer with a digit."""
    rewards = {
        "digit": {"kind": "regex", "pattern": "[0-9]", "whole": False},
        "short": {"kind": "length", "most_tokens": 16, "soft_tokens": 15, "weight": 0.5},
    }
    return tiny_config(
        **{
            "steps": STEPS,
            "model__num_layers": 3,
            "sequence_length": 64,
            "global_batch_size": BATCH,
            "gradient_accumulation_steps": None,
            "micro_batch_size": 4,
            "evaluate_every_steps": 3,
            "evaluation_samples": 4,
            "sample_tokens": 0,
            "optimizer__lr": 3e-3,
            "schedule__warmup_fraction": 0.0,
            "checkpoint__every_steps": 1,
            "objective__kind": "grpo",
            "objective__samples": SAMPLES,
            "objective__max_prompt_tokens": 16,
            "objective__max_answer_tokens": 16,
            "objective__rewards": rewards,
            "data__kind": "prompts",
            "data__paths": [str(prompts)],
            "data__held_out_fraction": 0.2,
            "data__mask_documents": True,
            "data__on_too_long": "drop",
            "data__packing": "best_fit",
            "data__max_bytes": None,
            **changes,
        }
    )


def train_and_die(cases: list[Case], process: Process) -> None:
    """Train one case until the event that its order names, then kill this rank."""
    (case,) = cases
    order = json.loads((case.run.root / _ORDER).read_text())
    if process.rank == order["rank"]:
        _kill_at(order["phase"], order["count"])
    train_case(case, process)


def _kill_at(phase: str, count: int) -> None:
    left = count

    def die_at_last(act: Callable[[], Any]) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            act()
            os.kill(os.getpid(), signal.SIGKILL)

    add, update = AnswerWriter.add, Stepper._update

    def dying_add(self: AnswerWriter, key: Any, **fields: Any) -> None:
        if ("rewards" if phase == "reward" else "ids") in fields:
            die_at_last(lambda: (self._file.write(b'{"prompt": 3, "sa'), self._file.flush()))
        add(self, key, **fields)

    def dying_update(self: Stepper, *given: Any) -> Any:
        step = None if count % 2 else update(self, *given)  # before the update, or after it
        die_at_last(lambda: None)
        return step or update(self, *given)

    if phase == "update":
        Stepper._update = dying_update  # type: ignore[method-assign]
    else:
        AnswerWriter.add = dying_add  # type: ignore[method-assign]


def trial(folder: Path, prompts: Path, layout: str, whole: RunPaths, seed: int) -> dict[str, Any]:
    """Train through a kill in each phase, and compare with the run `whole`."""
    dice = random.Random(seed)
    size, changes = LAYOUTS[layout]
    plan, run = tiny_plan(sampling(prompts, **changes), size), RunPaths(folder)
    run.root.mkdir(parents=True)
    started, died = time.monotonic(), []
    for attempt, phase in enumerate(dice.sample(PHASES, len(PHASES)), 1):
        most = {"rollout": 12, "reward": 24, "update": 2}[phase]
        rank = 0 if phase == "reward" or layout == "tensor" else dice.randrange(size)
        order = {"phase": phase, "count": dice.randint(1, most), "rank": rank}
        (run.root / _ORDER).write_text(json.dumps(order))
        try:
            train_cases(size, [Case(plan, run, attempt)], probe="grpo_kills:train_and_die")
        except AssertionError:
            died.append(f"{phase} {order['count']}")
    train_cases(size, [Case(plan, run, len(PHASES) + 1)])
    apart = _largest_difference(curve(run), curve(whole))
    assert apart < 1e-6, f"another curve, by {apart:.2g}"
    assert _evaluations(run) == _evaluations(whole), "other evaluations"
    assert _answers(run) == _answers(whole), "other answers"
    seconds = round(time.monotonic() - started, 1)
    return {"layout": layout, "killed": died, "apart": apart, "seconds": seconds}


def _largest_difference(one: Curve, other: Curve) -> float:
    """Return the largest difference of losses, or relative one of gradient norms.

    It is rounding: what is left of a rollout is sampled in batches of other sizes.
    """
    assert one.keys() == other.keys()
    pairs = [(one[step], other[step]) for step in other]
    return max(max(abs(a[0] - b[0]), abs(a[1] - b[1]) / max(abs(b[1]), 1e-3)) for a, b in pairs)


def _evaluations(run: RunPaths) -> dict[int, float]:
    records = [each for each in read_events(run.events) if each["event"] == "evaluation"]
    return {each["step"]: each["loss"] for each in records}


def _answers(run: RunPaths) -> dict[Any, Any]:
    """Return tokens and rewards of the kept answers, by step, prompt and sample."""
    return {
        (step_of(folder), *key): (fields["ids"].tolist(), fields["rewards"])
        for folder in run.rollouts.glob("step-*-*")
        for key, fields in read_answers(folder).items()
    }


def whole_run(folder: Path, prompts: Path, layout: str) -> RunPaths:
    """Train the run of a layout without a kill."""
    size, changes = LAYOUTS[layout]
    run = RunPaths(folder)
    train_cases(size, [Case(tiny_plan(sampling(prompts, **changes), size), run)])
    return run
