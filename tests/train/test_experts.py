"""Expert parallelism: the curve of one process, and checkpoints that go on with another size."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from expert_cases import STEPS, Trial
from parity_cases import CLIPPING, Difference, limit
from rank_processes import Case, curve, train_cases, with_stop

from trainctl.runs.layout import RunPaths

TWO = (2, 3)
"""Experts of one rank where four share eight: the others get no token."""

PAIRS = (
    Trial("gpt_oss", 4, 4, 1, TWO),
    Trial("gpt_oss", 4, 2, 3, TWO),
    Trial("mixtral", 2, 2, 2),
    Trial("qwen3_moe", 2, 2, 0),
    Trial("deepseek_v3", 4, 2, 2),
)
"""`scripts/parity_experts.py` has the whole product."""


@pytest.mark.slow
def test_experts_on_several_ranks_give_the_curve_of_one_process(tmp_path: Path) -> None:
    curve_of = functools.cache(lambda trial: trial.train(tmp_path))
    wrong = {}
    for trial in PAIRS:
        reference = curve_of(trial.reference)
        assert all(norm > CLIPPING for _, norm in reference.values())
        found = Difference.between(reference, curve_of(trial))
        if not found.within(limit(None)):
            wrong[trial] = found
    assert not wrong


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_expert_size(tmp_path: Path) -> None:
    """Bit for bit on the same one."""
    half = STEPS // 2
    trial = Trial("qwen3_moe", 2, 2, 3, settings=(("checkpoint__every_steps", half),))
    whole = RunPaths(tmp_path / "whole")
    train_cases(2, [Case(trial.plan(tmp_path), whole)])
    for other in (trial, replace(trial, expert=1, stage=1), replace(trial, processes=4, expert=4)):
        run = RunPaths(tmp_path / f"expert-{other.expert}")
        train_cases(2, [Case(with_stop(trial.plan(tmp_path), half), run)])
        train_cases(other.processes, [Case(other.plan(tmp_path), run, attempt=2)])
        found = curve(run)
        assert list(found) == list(range(1, STEPS + 1))
        if other == trial:
            assert found == curve(whole)
        assert Difference.between(curve(whole), found).within(limit(None)), other
