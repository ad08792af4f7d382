"""Expert parallelism: the curve of one process, and checkpoints that go on with another size."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from expert_cases import ADAPTED, STEPS, Trial, train_all
from parity_cases import Difference, limit
from rank_processes import Case, curve, tiny_config, train_cases, with_stop
from torch import nn
from transformers import AutoModelForCausalLM

from trainctl.config.registry import new_section
from trainctl.errors import TrainctlError
from trainctl.memory.engine import read_engine
from trainctl.memory.host import host_budget
from trainctl.memory.partial import trained_stages
from trainctl.memory.phases import resident_components
from trainctl.memory.stages import stages_from_anatomy
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve
from trainctl.train.export.adapter import export_adapter
from trainctl.train.export.check import check_adapter
from trainctl.train.export.directory import export
from trainctl.train.models.anatomy import anatomy
from trainctl.train.parallel.routers import Routers

TWO = (2, 3)
"""Experts of one rank where four share eight: the others get no token."""

LOSSES = (("experts__auxiliary_loss", 0.02), ("experts__z_loss", 0.01))

FOUR = (("gradient_accumulation_steps", 4),)
"""Micro-batches of a step, of which DualPipeV takes two for each rank."""

PAIRS = (
    Trial("gpt_oss", 4, 4, 1, TWO),
    Trial("gpt_oss", 4, 2, 3, TWO),
    Trial("qwen3_moe", 2, 2, 0),
    Trial("deepseek_v3", 4, 2, 1, stages=(1, 2)),  # its first block has no experts
    Trial("qwen3_moe", 4, 2, 1, stages=(1, 1, 1, 1), folded=True, blocks=4, settings=FOUR),
    Trial("deepseek_v3", 4, 2, 2, tensor=2),
    Trial("qwen3_moe", 2, 2, 3, offload="both"),
    Trial("qwen3_moe", 2, 2, 1, offload="optimizer"),
    Trial("mixtral", 4, 2, 3, tensor=2, adapter=ADAPTED),
    Trial("gpt_oss", 2, 1, 1, tensor=2, adapter=ADAPTED),
)
"""`scripts/parity_experts.py` has the whole product."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs of `runs` and of their model directories."""
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[Trial, RunPaths]:
    """All pairs and their references, trained."""
    return train_all((each for trial in PAIRS for each in (trial, trial.reference)), folder)


@pytest.mark.slow
def test_experts_on_several_ranks_give_the_curve_of_one_process(runs) -> None:
    wrong = {}
    for trial in PAIRS:
        reference = curve(runs[trial.reference])
        assert all(norm > trial.clipping for _, norm in reference.values())
        found = Difference.between(reference, curve(runs[trial]))
        if not found.within(limit(None)):
            wrong[trial] = found
    assert not wrong


@pytest.mark.slow
def test_in_fp64_tensor_ranks_leave_no_difference(tmp_path: Path) -> None:
    """What is above 1e-5 in fp32 is rounding: a fault of the layout would stay.

    At ZeRO 2, since DeepSpeed rounds gradients to fp32 at ZeRO 1 and 3 whatever their type.
    """
    trial = Trial("qwen3_moe", 4, 2, 2, tensor=2)
    curves = []
    for each in (trial.reference, trial):
        case = Case(each.plan(tmp_path, steps=3), RunPaths(tmp_path / str(each.processes)))
        train_cases(each.processes, [case], probe="fp64_probe:train")
        curves.append(curve(case.run))
    assert Difference.between(*curves).within(Difference(1e-12, 1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("trial", [trial for trial in PAIRS if trial.adapter], ids=str)
def test_peft_loads_an_adapter_of_experts_and_the_merged_model_equals_it(
    runs, folder: Path, tmp_path: Path, trial: Trial
) -> None:
    plan, run = trial.plan(folder), runs[trial]
    config, checkpoint = plan.config, checkpoints.list_checkpoints(run)[-1].path
    out, merged = tmp_path / "adapter", tmp_path / "merged"
    export_adapter(config, checkpoint, out, dtype=torch.float32)
    checked = check_adapter(config, checkpoint, out, dtype=torch.float32)
    assert checked.differences == [] and checked.difference <= checked.bound < 1e-4
    export(config, checkpoint, merged, dtype=torch.float32)
    base = partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager")
    theirs = logits_of(peft.PeftModel.from_pretrained(base(config.model.path), out))
    assert (theirs - logits_of(base(config.model.path))).abs().max() > 1e-2
    assert (logits_of(base(merged)) - theirs).abs().max() < 5e-6


def logits_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(48).view(2, 24) * 5 % 256
    with torch.no_grad():
        return model.eval()(ids).logits


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
    Trial("qwen3_moe", 4, 2, 2, tensor=2, settings=LOSSES),
)


@pytest.mark.slow
def test_balancing_and_what_is_recorded_of_it_know_no_layout(tmp_path: Path) -> None:
    alone = {trial: replace(trial.reference, settings=only_of_experts(trial)) for trial in BALANCED}
    first = replace(BALANCED[0].reference, settings=())
    runs = train_all([*BALANCED, *alone.values(), first], tmp_path, steps=4)
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
        assert read_events(runs[trial].events, "start")[0]["expert_products"] == "grouped_mm"
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
    """Experts are divided by the expert axis with its tensor ranks, and by the replicas that have
    the same.
    """
    plans, world_size = [], 4
    for trial, compute in (
        (Trial("mixtral", world_size, 2, 1), "bf16"),
        (Trial("mixtral", world_size, 4, 3), "fp32"),
        (Trial("mixtral", world_size, 2, 1, tensor=2), "bf16"),
        (Trial("mixtral", world_size, 2, 2, adapter=ADAPTED), "bf16"),
        (Trial("mixtral", world_size, 2, 3, tensor=2, adapter=ADAPTED), "fp32"),
        (Trial("mixtral", world_size, 1, 2, tensor=2, adapter=ADAPTED), "bf16"),
        (Trial("mixtral", world_size, 2, 2, offload="optimizer"), "bf16"),
    ):
        changes = {"zero_stage__reduce_bucket_size": 5_000, "precision__compute": compute}
        plans.append(replace(trial, settings=tuple(changes.items())).plan(tmp_path))
    cases = [Case(plan, RunPaths(tmp_path / str(index))) for index, plan in enumerate(plans)]
    expected = []
    for plan in plans:
        axes = {"tensor": plan.mesh.tensor, "expert": plan.mesh.expert}
        whole = stages_from_anatomy(anatomy(plan.config.model), **axes)
        (held,), engine = trained_stages(plan.config, whole, **axes), read_engine(plan)
        host = sum(host_budget(plan, engine, held, 0).components.values()) // world_size
        resident = resident_components(engine, held, 0).total + host
        expected.append(pytest.approx(resident, rel=0.01))
    ranks = train_cases(world_size, cases, probe="census_probe:resident")
    for counted in ranks:
        assert counted[:-1] == expected[:-1]
    # Accumulated gradients are of whole tensors, also of those that several ranks share.
    assert max(counted[-1] for counted in ranks) == expected[-1]


def test_experts_that_are_not_joined_are_not_balanced_in_silence() -> None:
    config = tiny_config(experts__z_loss=0.01)
    config.model = new_section("model", "hf", path="somewhere", num_experts=4)
    with pytest.raises(TrainctlError, match="Linear has no experts that transformers has joined"):
        Routers(nn.Linear(2, 2), config)
    config.experts.z_loss = 0.0
    Routers(nn.Linear(2, 2), config)
