"""The plan of a run that a program of the user's trains."""

from __future__ import annotations

import pytest

from trainctl.launchers.planning import PlannedConfig, compose_config, plan_config

SCHEDULER = "deepspeed.scheduler={type: WarmupLR, params: {warmup_num_steps: 10}}"


def planned(*overrides: str) -> PlannedConfig:
    return plan_config(compose_config(["recipe=tiny", *overrides], None))


@pytest.mark.parametrize("program", ["script=train.py", "trainer=a:b"])
def test_the_scheduler_may_be_deepspeeds(program: str) -> None:
    made = planned(program, SCHEDULER).assessment.plan
    assert made is not None and made.deepspeed["scheduler"]["type"] == "WarmupLR"
    refused = planned(SCHEDULER)
    assert refused.assessment.plan is None
    assert "deepspeed.scheduler" in {finding.key for finding in refused.errors}


def test_deepspeed_reports_where_our_trainer_does_not() -> None:
    made = planned("script=train.py", "logging.every_steps=7").assessment.plan
    assert made is not None and made.deepspeed["steps_per_print"] == 7
    assert "wall_clock_breakdown" not in made.deepspeed


def test_what_our_trainer_cannot_do_yet_a_script_may() -> None:
    typed = ["model.trust_remote_code=true"]
    ours, theirs = (planned(*typed, *own).assessment.plan for own in ([], ["script=train.py"]))
    assert ours is not None and len(ours.not_yet) == 1
    assert theirs is not None and theirs.not_yet == ()
    elsewhere = planned("script=train.py", "hardware.nodes=2", "launcher=slurm").assessment.plan
    assert elsewhere is not None and elsewhere.not_yet == ()


@pytest.mark.parametrize(
    ("layout", "key", "value"),
    [
        ("parallelism=tensor", "tensor_parallel", {"autotp_size": 2}),
        ("parallelism=sequence", "sequence_parallel_size", 2),
    ],
)
def test_a_script_hears_of_the_layout_and_our_trainer_brings_its_own_mesh(
    layout: str, key: str, value: object
) -> None:
    typed = [layout, "hardware=2xcpu"]
    ours, theirs = (planned(*typed, *own).assessment.plan for own in ([], ["script=train.py"]))
    assert ours is not None and key not in ours.deepspeed
    assert theirs is not None and theirs.deepspeed[key] == value
