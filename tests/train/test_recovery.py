"""A spoilt run recovers whatever has a state of its own: optimizers, a ramp, layouts of four."""

from functools import partial

import pytest
from poison import NAN, Poisoned, train_poisoned
from rank_processes import curve, tiny_plan
from test_optimizers import LEARNING_RATES
from test_settings_on_layouts import on_nvme
from test_stability import BATCH, assert_recovers, events, plan

from trainctl.config.schema import (
    AdaptiveClipping,
    DataType,
    OffloadDevice,
    OnBadLoss,
)
from trainctl.runs.layout import RunPaths

REWIND, SKIP = OnBadLoss.rewind, OnBadLoss.skip_batch


@pytest.mark.parametrize(
    ("kind", "stage", "policy"),
    [
        ("adafactor", 3, REWIND),
        pytest.param("adamw_8bit", 3, REWIND, marks=pytest.mark.slow),
        pytest.param("muon", 1, REWIND, marks=pytest.mark.slow),
        pytest.param("lion", 3, SKIP, marks=pytest.mark.slow),
        pytest.param("lamb", 2, REWIND, marks=pytest.mark.slow),
        pytest.param("sgd", 3, REWIND, marks=pytest.mark.slow),
    ],
)
def test_every_optimizer(tmp_path, kind, stage, policy):
    settings = {"optimizer__kind": kind, "optimizer__lr": LEARNING_RATES.get(kind, 3e-4)}
    assert_recovers(tmp_path, partial(plan, stage, DataType.fp32, **settings), policy)


def test_limits_of_the_norm_match_the_checkpoint(tmp_path):
    settings = {
        "gradients__adaptive_clipping": AdaptiveClipping.percentile,
        "gradients__adaptive_percentile": 25.0,
        "gradients__noise": 1e-6,
        "gradients__clip_value": 2e-3,
        "gradients__centralize": True,
    }
    assert_recovers(tmp_path, partial(plan, 2, DataType.fp32, **settings), REWIND)


RAMP = {
    "training__global_batch_size": 16,
    "training__gradient_accumulation_steps": None,
    "training__micro_batch_size": 2,
    "training__batch_ramp": [{"until_steps": 2, "global_batch_size": BATCH}],
}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_batch_that_is_skipped_where_a_ramp_grows(tmp_path, stage):
    """The first batch of 16 is bad, and the next batch of 16 makes the step."""
    made = partial(plan, stage, DataType.bf16, **RAMP)
    end = 2 * BATCH + 16
    poison = tuple((sample, NAN) for sample in range(2 * BATCH, end))
    spoilt, clean = RunPaths(tmp_path / "spoilt"), RunPaths(tmp_path / "clean")
    found = train_poisoned(Poisoned(made(SKIP), spoilt, poison=poison))
    wanted = train_poisoned(Poisoned(made(SKIP), clean, missing=((2 * BATCH, end),)))
    assert [one.error for one in found] == ["", ""] and curve(spoilt) == curve(clean)
    assert [one.digest for one in found] == [one.digest for one in wanted]
    (event,) = events(spoilt, "intervention")
    assert (event["step"], event["samples"]) == (3, [2 * BATCH, end])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "policy"), [("tensor", SKIP), ("pipeline", REWIND), ("sequence", REWIND)]
)
def test_four_ranks_decide_alike_what_two_have_seen(tmp_path, axis, policy):
    """Two data ranks of two each, in bf16; one of them has the bad sample."""
    settings = {f"parallelism__{axis}": 2, "optimizer__layer_lr_decay": 0.7}

    def made(policy):
        return tiny_plan(plan(1, DataType.bf16, policy, **settings).config, 4)

    spoilt, clean = RunPaths(tmp_path / "spoilt"), RunPaths(tmp_path / "clean")
    has_losses = axis != "pipeline"
    bad = 3 * BATCH + 2
    found = train_poisoned(
        Poisoned(made(policy), spoilt, poison=((bad, NAN),), gradient_only=not has_losses), 4
    )
    since = 3 if policy is SKIP else 2  # the batch alone, or all from the checkpoint on
    wanted = train_poisoned(Poisoned(made(policy), clean, missing=((since * BATCH, 4 * BATCH),)), 4)
    assert [one.error for one in found] == [""] * 4
    assert curve(spoilt) == curve(clean)
    assert [one.digest for one in found] == [one.digest for one in wanted]
    (event,) = events(spoilt, "intervention")
    assert event["step"] == 4 and event["ranks"] == ([2, 3] if has_losses else [])
    assert (bad in event["suspects"]) == has_losses


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles what swaps when it is first used
def test_parameters_on_nvme_match_the_checkpoint(tmp_path):
    settings = on_nvme(tmp_path, parameters=OffloadDevice.nvme)
    made = partial(plan, 3, DataType.fp32, **settings)
    assert_recovers(tmp_path, made, REWIND, gradient_only=True)
