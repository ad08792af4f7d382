"""KTO: its loss, and one curve on every layout, which is TRL's where both take one baseline."""

from __future__ import annotations

import pytest
import torch
from objective_cases import LAYOUTS, config_of, difference, plan_on, train_on, write_records
from rank_processes import Case, curve, train_cases, trained, with_stop
from trl_trainers import compare_steps, train_with_trl

from trainctl.config.registry import new_section
from trainctl.options.data import SampleKind
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.models.model import skeleton
from trainctl.train.objectives.base import ObjectiveLoss


def records(run: RunPaths, kind: str) -> list[dict]:
    return [each for each in read_events(run.events) if each["event"] == kind]


def test_the_baseline_is_the_mean_of_the_counted_records_and_has_no_gradient():
    objective = ObjectiveLoss(
        new_section("objective", "kto", beta=0.3, desirable_weight=2.0, undesirable_weight=0.5)
    )
    features = torch.tensor([[1.0, 0.5, 1.0], [-2.0, 1.5, 0.0], [9.0, 9.0, 0.0]])
    features.requires_grad_()
    is_counted = torch.tensor([True, True, False])
    losses, measures = objective.whole(features, is_counted)
    expected = [
        2 * (1 - torch.tensor(0.3 * (1 - 1.0)).sigmoid()),
        0.5 * (1 - torch.tensor(0.9).sigmoid()),
    ]
    assert losses.tolist() == pytest.approx([*map(float, expected), 0.0])
    assert measures[:, -1].tolist() == [1.0, 1.0, 0.0]
    (gradient,) = torch.autograd.grad(losses.sum(), features)
    assert (gradient[:2, 0] != 0).all() and (gradient[2] == 0).all()
    assert (gradient[:, 1] == 0).all()
    below = objective.whole(torch.tensor([[1.0, -4.0, 1.0]]), torch.tensor([True]))[1]
    assert below[0, -1] == 0


@pytest.mark.slow
def test_every_layout_has_one_curve_and_a_run_goes_on_bit_for_bit(tmp_path):
    found = train_on(["1", "accumulation", "ZeRO 3", "TP 2", "DP 4"], "kto", tmp_path, steps=6)
    for name, losses in found.items():
        assert losses is not None and difference(losses, found["1"]) < 1e-5, name
    plan = plan_on(LAYOUTS["ZeRO 3"], "kto", tmp_path, steps=6)
    resumed = RunPaths(tmp_path / "resumed")
    train_cases(2, [Case(with_stop(plan, 3), resumed)])
    train_cases(2, [Case(plan, resumed, 2)])
    assert curve(resumed) == curve(RunPaths(tmp_path / "kto-ZeRO-3"))
    last = records(resumed, "step")[-1]["objective"]
    assert last["margin"] > 0 and last["kl"] > 0.1


@pytest.mark.slow
def test_the_curve_matches_trl(tmp_path):
    """Each step is the whole file, in its order: only then do both pair the same answers."""
    steps, rate = 20, 1e-3
    config = config_of(
        "kto",
        tmp_path,
        steps=steps,
        evaluate_every_steps=None,
        data__shuffle=False,
        data__held_out_fraction=0.0,
        micro_batch_size=8,
        global_batch_size=8,
        evaluation_samples=0,
        optimizer__lr=rate,
        optimizer__weight_decay=0.0,
        schedule__kind="constant",
        model__initial_weights=str(tmp_path / "model"),
    )
    file = write_records(tmp_path, SampleKind.answers, 8)
    torch.manual_seed(1)
    model = skeleton(config.model, torch.float32)
    type(model)(model.config).save_pretrained(tmp_path / "model")
    run = trained(tmp_path / "run", config)
    options = {"beta": 0.1, "undesirable_weight": 0.2, "precompute_ref_log_probs": True}
    theirs = train_with_trl("kto", tmp_path / "model", file, steps=steps, rate=rate, **options)
    ours = records(run, "step")
    compare_steps(ours, theirs, first_within=1e-5)
    assert max(each["kl"] for each in theirs) > 1
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        for name, theirs_name in (("margin", "rewards/margins"), ("kl", "kl")):
            assert our["objective"][name] == pytest.approx(their[theirs_name], abs=2e-3), number
