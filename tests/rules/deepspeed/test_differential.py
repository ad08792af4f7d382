"""Our rules against the real DeepSpeed: each JSON is checked, and then run on two processes.

What our checker passes, DeepSpeed runs; what DeepSpeed runs as one expects, our checker passes; and
what DeepSpeed accepts without a word and does otherwise, our checker reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sampler import Case, around, every_break, sample

from trainctl.errors import Finding
from trainctl.rules.resolve import JSON_RULES, check_json
from trainctl.rules.rule import Enforcement

HERE = Path(__file__).parent
MATRIX = HERE / "confusion_matrix.json"
SEED, COUNT = 20_260, 100
UNSEEN, UNSEEN_COUNT = int(os.environ.get("TRAINCTL_SEED", "31")), 20
"""Another seed: any must do."""

BY_ID = {rule.code: rule for rule in JSON_RULES}
NOT_RUN = {
    "TC209": "transformers or accelerate fill values in, not DeepSpeed",
    "TC218": "needs a model of transformers' with attention heads",
    "TC249": "needs CPUAdam, which is compiled first (tests/train/test_zenflow.py)",
    "TC289": "needs an NVMe drive and a compiled library",
}
"""Rules that no tiny model on two CPU processes can break; each has a test of its own."""


def really(cases: Sequence[Case], timeout: float) -> list[dict[str, Any]]:
    """Run each case by the real DeepSpeed, and return the answers."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "real_deepspeed.py")],
        input="".join(json.dumps(case) + "\n" for case in cases),
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def ours(case: Case) -> list[Finding]:
    return list(check_json(case["json"], around(case)))


def compared(cases: Sequence[Case], answers: Sequence[dict[str, Any]]) -> tuple[Counter, list[str]]:
    """Return the confusion matrix, and a line for each disagreement."""
    matrix: Counter[str] = Counter()
    wrong = []
    for case, answer in zip(cases, answers, strict=True):
        found = ours(case)
        errors = [finding for finding in found if finding.is_error]
        runs = "ok" in answer
        # An error for what DeepSpeed accepts in silence says so itself.
        mistaken = [each for each in errors if BY_ID[each.rule].meets is Enforcement.refused]
        if runs:
            kind = "runs, refused" if mistaken else "trap, refused" if errors else "runs, passed"
        else:
            kind = "refused, refused" if errors else "refused, passed"
        matrix[kind] += 1
        disagrees = kind in ("runs, refused", "refused, passed")
        expected = case["breaks"]
        unseen = expected.startswith("TC") and expected not in {each.rule for each in found}
        if disagrees or unseen:
            what = f"{expected} is not reported" if unseen else kind
            wrong.append(
                f"{what}: {json.dumps(case['json'])} {case.get('stages', '')}\n"
                f"  DeepSpeed: {answer}\n  ours: {[(each.rule, each.message) for each in found]}"
            )
    return matrix, wrong


@pytest.mark.slow
def test_they_agree_on_the_recorded_seed_and_the_matrix_is_what_it_was():
    cases = sample(SEED, COUNT)
    matrix, wrong = compared(cases, really(cases, 540))
    assert not wrong, "\n".join(wrong)
    assert 0.4 <= matrix["runs, passed"] / COUNT <= 0.6, matrix
    table = {"seed": SEED, "cases": COUNT, **dict(sorted(matrix.items()))}
    if os.environ.get("TRAINCTL_UPDATE_GOLDEN"):
        MATRIX.write_text(json.dumps(table, indent=2) + "\n")
    assert json.loads(MATRIX.read_text()) == table


@pytest.mark.slow
def test_they_agree_on_an_unseen_seed():
    cases = sample(UNSEEN, UNSEEN_COUNT)
    _, wrong = compared(cases, really(cases, 540))
    assert not wrong, f"TRAINCTL_SEED={UNSEEN}\n" + "\n".join(wrong)


@pytest.mark.slow
def test_every_rule_is_met_by_the_real_deepspeed():
    cases = every_break(SEED)
    _, wrong = compared(cases, really(cases, 540))
    assert not wrong, "\n".join(wrong)
    hit = {finding.rule for case in cases for finding in ours(case)}
    assert hit | set(NOT_RUN) == set(BY_ID)


def test_every_rule_is_tried_or_says_why_not():
    assert {case["breaks"] for case in every_break(0)} | set(NOT_RUN) == set(BY_ID)
