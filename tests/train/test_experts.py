"""Expert parallelism: the curve of one process, and checkpoints that go on with another size."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from expert_cases import STEPS, Trial, train_all
from parity_cases import CLIPPING, Difference, limit
from rank_processes import Case, curve, tiny_config, train_cases, with_stop
from torch import nn

from trainctl.config.registry import new_section
from trainctl.errors import TrainctlError
from trainctl.memory.engine import read_engine
from trainctl.memory.phases import resident_components
from trainctl.memory.stages import stages_from_anatomy
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve
from trainctl.train.models.anatomy import anatomy
from trainctl.train.parallel.routers import Routers

TWO = (2, 3)
"""Experts of one rank where four share eight: the others get no token."""

LOSSES = (("experts__auxiliary_loss", 0.02), ("experts__z_loss", 0.01))

PAIRS = (
    Trial("gpt_oss", 4, 4, 1, TWO),
    Trial("gpt_oss", 4, 2, 3, TWO),
    Trial("mixtral", 2, 2, 2),
    Trial("qwen3_moe", 2, 2, 0),
    Trial("deepseek_v3", 4, 2, 1, stages=(1, 2)),  # its first block has no experts
)
"""`scripts/parity_experts.py` has the whole product."""


@pytest.mark.slow
def test_experts_on_several_ranks_give_the_curve_of_one_process(tmp_path: Path) -> None:
    runs = train_all((each for trial in PAIRS for each in (trial, trial.reference)), tmp_path)
    wrong = {}
    for trial in PAIRS:
        reference = curve(runs[trial.reference])
        assert all(norm > CLIPPING for _, norm in reference.values())
        found = Difference.between(reference, curve(runs[trial]))
        if not found.within(limit(None)):
            wrong[trial] = found
    assert not wrong


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_expert_size(tmp_path: Path) -> None:
    """Bit for bit on the same one."""
    half = STEPS // 2
    trial = Trial("qwen3_moe", 2, 2, 3, settings=(("checkpoint__every_steps", half),))
    whole, stopped = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "stopped")
    plan = trial.plan(tmp_path)
    train_cases(2, [Case(plan, whole), Case(with_stop(plan, half), stopped)], together=True)
    by_size = {
        2: (trial, replace(trial, expert=1, stage=1)),
        4: (
            replace(trial, processes=4, expert=4),
            replace(trial, processes=4, stage=1, stages=(2, 1)),
        ),
    }
    for size, others in by_size.items():
        cases = []
        for number, other in enumerate(others):
            run = RunPaths(tmp_path / f"other-{size}-{number}")
            shutil.copytree(stopped.root, run.root)
            cases.append(Case(other.plan(tmp_path), run, attempt=2))
        train_cases(size, cases, together=True)
        for other, case in zip(others, cases, strict=True):
            found = curve(case.run)
            assert list(found) == list(range(1, STEPS + 1))
            if other == trial:
                assert found == curve(whole)
            assert Difference.between(curve(whole), found).within(limit(None)), other


BALANCED = (
    Trial("qwen3_moe", 2, 2, 1, settings=(*LOSSES, ("activation_checkpointing__mode", "full"))),
    Trial(
        "deepseek_v3",
        4,
        2,
        3,
        settings=(
            ("experts__auxiliary_loss", 0.02),
            ("experts__bias_update_rate", 0.01),
            ("activation_checkpointing__mode", "selective"),
        ),
    ),
)


@pytest.mark.slow
def test_balancing_and_what_is_recorded_of_it_know_no_layout(tmp_path: Path) -> None:
    alone = {trial: replace(trial.reference, settings=only_of_experts(trial)) for trial in BALANCED}
    first = replace(BALANCED[0].reference, settings=())
    runs = train_all([*BALANCED, *alone.values(), first], tmp_path)
    for trial in BALANCED:
        one, loads = recorded(runs[alone[trial]])
        other, others = recorded(runs[trial])
        assert Difference.between(one, other).within(limit(None)), trial
        for load, found in zip(loads, others, strict=True):
            assert load["load"] == pytest.approx(max(load["load_by_layer"]), abs=1e-4)
            assert load["load"] > 1
            assert load.pop("load_by_layer") == found.pop("load_by_layer")
            assert load == pytest.approx(found, rel=1e-5)
            # Least is each token's number of experts, where all are equally busy.
            assert 2 * 0.02 < load["auxiliary_loss"] < 3 * 0.02
        assert loads[0] != loads[-1]
    balanced = curve(runs[alone[BALANCED[0]]])
    assert Difference.between(curve(runs[first]), balanced).norm > 1e-4


def only_of_experts(trial: Trial) -> tuple[tuple[str, object], ...]:
    """Return the trial's settings of `experts`, without those of layout and precision."""
    return tuple(item for item in trial.settings if item[0].startswith("experts__"))


def recorded(run: RunPaths) -> tuple[dict[int, tuple[float, float]], list[dict]]:
    """Return the run's curve, and the `experts` field of each step's record."""
    events = step_curve(read_events(run.events))
    return curve(run), [event["experts"] for event in events.values()]


@pytest.mark.slow
def test_the_budget_of_states_is_what_the_ranks_hold(tmp_path: Path) -> None:
    """Experts are divided by the expert axis, and by the replicas that have the same."""
    plans, world_size = [], 4
    for expert, stage, compute in ((2, 1, "bf16"), (4, 3, "fp32")):
        changes = {"zero_stage__reduce_bucket_size": 5_000, "precision__compute": compute}
        trial = Trial("mixtral", world_size, expert, stage, settings=tuple(changes.items()))
        plans.append(trial.plan(tmp_path))
    cases = [Case(plan, RunPaths(tmp_path / str(index))) for index, plan in enumerate(plans)]
    expected = []
    for plan in plans:
        (held,) = stages_from_anatomy(anatomy(plan.config.model), expert=plan.mesh.expert)
        expected.append(
            pytest.approx(resident_components(read_engine(plan), held, 0).total, rel=0.01)
        )
    for counted in train_cases(world_size, cases, probe="census_probe:resident"):
        assert counted == expected


def test_experts_that_are_not_joined_are_not_balanced_in_silence() -> None:
    config = tiny_config(experts__z_loss=0.01)
    config.model = new_section("model", "hf", path="somewhere", num_experts=4)
    with pytest.raises(TrainctlError, match="Linear has no experts that transformers has joined"):
        Routers(nn.Linear(2, 2), config)
    config.experts.z_loss = 0.0
    Routers(nn.Linear(2, 2), config)
