"""The trainer asks of an engine what the protocol says, and knows no other."""

from __future__ import annotations

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.schema import RunConfig
from trainctl.engines.deepspeed.wrappers import wrapper_adapter
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

STEPS = 6


def clipped(stage: int) -> RunConfig:
    return tiny_config(
        steps=STEPS,
        evaluate_every_steps=STEPS,
        sample_tokens=8,
        precision__compute="fp32",
        optimizer__gradient_clipping=0.5,  # always active
        zero_stage__stage=stage,
    )


def end_of(run: RunPaths) -> tuple[float, str]:
    """Held-out loss and the sampled text."""
    events = {event["event"]: event for event in read_events(run.events)}
    return events["evaluation"]["loss"], events["sample"]["text"]


@pytest.mark.slow
def test_another_engine_trains_alike_and_goes_on_from_the_checkpoints_of_deepspeed(tmp_path):
    """Nothing of the trainer or of a checkpoint is DeepSpeed's."""
    plan = tiny_plan(clipped(stage=0), 2)
    expected, alone, resumed = (
        RunPaths(tmp_path / name) for name in ("expected", "alone", "resumed")
    )
    # DeepSpeed's third stage, then plain torch, then its second stage.
    stage_3, stage_2 = (tiny_plan(clipped(stage), 2) for stage in (3, 2))
    train_cases(2, [Case(plan, expected), Case(with_stop(stage_3, 2), resumed)], together=True)
    both = [Case(plan, alone), Case(with_stop(plan, 4), resumed, 2)]
    train_cases(2, both, probe="plain_engine:train")
    train_cases(2, [Case(stage_2, resumed, 3)])
    for run in (alone, resumed):
        for step, (loss, norm) in curve(expected).items():
            assert curve(run)[step][0] == pytest.approx(loss, rel=1e-6), step
            assert curve(run)[step][1] == pytest.approx(norm, rel=5e-6), step
        assert end_of(run)[0] == pytest.approx(end_of(expected)[0], abs=2e-6)
        assert end_of(run)[1] == end_of(expected)[1]


def test_a_wrapper_that_nobody_has_written_an_adapter_for_is_refused():
    with pytest.raises(AssertionError, match="without an adapter"):
        wrapper_adapter(object())
