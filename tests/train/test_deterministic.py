"""`training.deterministic`: what torch is told on a rank, and two runs that are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import DataType
from trainctl.engines.process import nondeterminism_error
from trainctl.runs.layout import RunPaths


@pytest.mark.slow
def test_two_runs_have_the_same_curve_and_what_cannot_be_repeated_is_named(tmp_path: Path) -> None:
    cases = []
    for number in range(2):
        config = tiny_config(
            steps=3,
            sequence_length=32,
            global_batch_size=4,
            evaluation_samples=0,
            deterministic=True,
        )
        config.zero_stage.stage, config.precision.compute = 2, DataType.bf16
        cases.append(Case(tiny_plan(config, 2), RunPaths(tmp_path / str(number))))
    for algorithms, fills_memory, tunes, message in train_cases(
        2, cases, probe="deterministic_probe:train"
    ):
        assert algorithms and not fills_memory and not tunes
        assert message.startswith("training.deterministic=true: max_unpooling2d_forward")
        assert message.endswith("does not have a deterministic implementation")
    first, second = (curve(case.run) for case in cases)
    assert first == second and len(first) == 3


def test_an_error_about_something_else_stays_what_it_is() -> None:
    assert nondeterminism_error(RuntimeError("a deterministic failure")) is None
