"""Tests of training options on layouts and memory placements that their own tests leave out.

Each run is compared with a run of one process that has everything in memory.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from parity_cases import Difference, enlarge
from plain_torch import plain_torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, trained, with_stop

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    Accelerator,
    AdaptiveClipping,
    CompileKind,
    DataType,
    OffloadDevice,
)
from trainctl.hardware import Hardware
from trainctl.rules.resolve import resolve
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

ALONE = {"zero_stage__stage": 0}
TENSOR = {"zero_stage__stage": 1, "parallelism__tensor": 2}
PIPELINE = {"zero_stage__stage": 1, "parallelism__pipeline": 2}


def clipped(*, steps, large=False, **changes):
    chosen = {
        "sequence_length": 32,
        "precision__compute": "fp32",
        "optimizer__lr": 1e-3,
        "optimizer__gradient_clipping": 0.5,  # always active
        "schedule__warmup_steps": 2,
        "checkpoint__at_end": False,
    }
    config = tiny_config(steps=steps, evaluation_samples=0, **{**chosen, **changes})
    if large:
        enlarge(config)
    return config


def steps_of(run):
    return [event for event in read_events(run.events) if event["event"] == "step"]


def assert_same_curve(run, reference, *, loss=1e-5, norm=1e-5):
    difference = Difference.between(curve(reference), curve(run))
    assert list(curve(run)) == list(curve(reference))
    assert difference.within(Difference(loss, norm)), difference


RAMP = {
    "training__global_batch_size": 16,
    "training__gradient_accumulation_steps": None,
    "training__micro_batch_size": 2,
    "training__batch_ramp": [
        {"until_steps": 2, "global_batch_size": 4},
        {"until_steps": 4, "global_batch_size": 8},
    ],
}


def assert_same_ramp(folder, layouts, **changes):
    alone = trained(folder / "alone", clipped(steps=5, **RAMP, **changes, **ALONE), 1)
    bounds = [event["samples"] for event in steps_of(alone)]
    assert [end - first for first, end in bounds] == [4, 4, 8, 8, 16]
    for number, layout in enumerate(layouts):
        config = clipped(steps=5, **RAMP, **changes, **layout)
        run = trained(folder / str(number), config, 2)
        assert [event["samples"] for event in steps_of(run)] == bounds
        assert_same_curve(run, alone)


@pytest.mark.slow
def test_a_batch_ramp_over_tensor_shards(tmp_path):
    assert_same_ramp(tmp_path, [TENSOR, {**TENSOR, "zero_stage__stage": 3}])


def on_nvme(folder: Path, *, parameters: OffloadDevice):
    """Settings; skips where nothing can be swapped."""
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("needs the headers of libaio (Debian's libaio-dev)")
    return {
        "zero_stage__stage": 3,
        "offload__optimizer": OffloadDevice.nvme,
        "offload__parameters": parameters,
        "offload__nvme_path": str(folder / "nvme"),
        "offload__buffer_size": 1_000_000,
        "offload__buffer_count": 32,
        "offload__max_in_cpu": 0,
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles what swaps when it is first used
def test_a_batch_ramp_with_states_on_nvme(tmp_path):
    layouts = [
        on_nvme(tmp_path, parameters=OffloadDevice.none),
        on_nvme(tmp_path, parameters=OffloadDevice.nvme),
    ]
    assert_same_ramp(tmp_path, layouts, large=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [{}, {"parallelism__tensor": 2}], ids=["alone", "tensor"])
def test_one_data_rank_recomputes_with_weights_from_nvme(tmp_path, layout):
    """It has all of a weight, and the buffer that this is read into is used again meanwhile."""
    alone = trained(tmp_path / "alone", clipped(steps=3, large=True, **ALONE), 1)
    swapped = on_nvme(tmp_path, parameters=OffloadDevice.nvme)
    config = clipped(steps=3, large=True, **swapped, **layout)
    config.activation_checkpointing = new_section("activation_checkpointing", "full")
    assert_same_curve(trained(tmp_path / "run", config, len(layout) + 1), alone)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gradients_are_changed_on_nvme(tmp_path):
    """DeepSpeed reads and writes them there, and clips by norms that it took on the way."""
    changes = {
        "gradients__centralize": True,
        "gradients__clip_value": 5e-4,
        "gradients__noise": 1e-9,
        "gradients__adaptive_clipping": AdaptiveClipping.percentile,
        "gradients__adaptive_percentile": 25.0,
        "optimizer__gradient_clipping": 100.0,  # more than any norm here
        "schedule__kind": "constant",
        "schedule__warmup_steps": 0,
    }
    made = plain_torch(clipped(steps=5, large=True, **changes), tmp_path / "plain", steps=5)
    for number, parameters in enumerate((OffloadDevice.none, OffloadDevice.nvme)):
        layout = on_nvme(tmp_path, parameters=parameters)
        config = clipped(steps=5, large=True, **changes, **layout)
        run = trained(tmp_path / str(number), config, 2)
        difference = Difference.between(made.curve, curve(run))
        assert difference.within(Difference(2e-5, 2e-5)), difference
        noted = [event["clip_at"] for event in steps_of(run)]
        assert noted == pytest.approx(made.limits, rel=2e-5)


GROUPS = {
    "a rate for each block": {"optimizer__layer_lr_decay": 0.5},
    "muP, whose head has a rate of its own": {
        "model__num_attention_heads": 4,
        "model__mup": True,
        "model__mup_base_width": 32,
        "model__tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("name", GROUPS)
def test_stages_may_have_different_parameter_groups(name, tmp_path):
    alone = trained(tmp_path / "alone", clipped(steps=4, **GROUPS[name], **ALONE), 1)
    run = trained(tmp_path / "run", clipped(steps=4, **GROUPS[name], **PIPELINE), 2)
    assert_same_curve(run, alone)
    assert {key: pytest.approx(value, rel=1e-5) for key, value in norms(run).items()} == norms(
        alone
    )


def norms(run):
    """Return the gradient norm of each parameter group at the last step."""
    return steps_of(run)[-1]["grad_norms"]


@pytest.mark.slow
def test_mup_in_bf16_on_every_layout(tmp_path):
    """Layouts round differently; the differences must not depend on muP."""

    def mup(**layout):
        config = clipped(steps=6, sequence_length=128, precision__compute=DataType.bf16, **layout)
        model = config.model
        model.num_attention_heads, model.num_key_value_heads = 4, 2
        model.mup, model.mup_base_width, model.mup_base_head_dim = True, 32, 8
        config.optimizer.lr = 1e-2
        return config

    alone = trained(tmp_path / "alone", mup(**ALONE), 1)
    for name, layout in (("tensor", TENSOR), ("pipeline", PIPELINE)):
        run = trained(tmp_path / name, mup(**layout), 2)
        assert_same_curve(run, alone, loss=3e-3, norm=1e-2)


def fp16_case(run, **layout):
    """Planned for GPUs, then moved to CPU processes, which a plan is refused for; their number."""
    precision = {"precision__compute": "fp16", "precision__initial_scale_power": 18}
    config = clipped(steps=6, **precision, **layout)
    config.optimizer.layer_lr_decay = 0.7
    config.kernels.liger, config.kernels.compile = False, CompileKind.none
    ranks = config.parallelism.tensor * config.parallelism.pipeline
    gpus = Hardware(name="gpu", accelerator=Accelerator.cuda, nodes=1, devices_per_node=ranks)
    plan = resolve(config, gpus).plan
    assert plan is not None
    return Case(replace(plan, hardware=replace(gpus, accelerator=Accelerator.cpu)), run), ranks


@pytest.mark.slow
def test_all_ranks_skip_what_overflows_in_fp16(tmp_path):
    """The loss scale starts too high, so updates are skipped until it fits."""
    found = {}
    for name, layout in (("alone", {}), ("tensor", TENSOR), ("pipeline", PIPELINE)):
        case, ranks = fp16_case(RunPaths(tmp_path / name), **layout)
        train_cases(ranks, [case], probe="format_probe:train_in_fp16")
        found[name] = steps_of(case.run)
    alone = found.pop("alone")
    assert [event.get("skipped", False) for event in alone] == [True] * 3 + [False] * 3
    for steps in found.values():
        for key in ("skipped", "loss_scale"):
            assert [event.get(key) for event in steps] == [event.get(key) for event in alone]
        losses = [event["loss"] for event in steps]
        assert losses == pytest.approx([event["loss"] for event in alone], abs=1e-3)


HOSTED = ("adam", "lion", "sgd")
"""Optimizers besides AdamW that update states in host memory."""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles their kernels when they are first used
@pytest.mark.parametrize("kind", HOSTED)
def test_optimizers_update_and_resume_in_host_memory(kind, tmp_path):
    def config(stage, offload=OffloadDevice.cpu):
        return clipped(
            steps=5,
            zero_stage__stage=stage,
            offload__optimizer=offload,
            optimizer__kind=kind,
            optimizer__weight_decay=0.1,
            optimizer__lr=0.1 if kind == "sgd" else 1e-3,
        )

    alone = trained(tmp_path / "alone", config(0, OffloadDevice.none), 1)
    losses = [loss for loss, _ in curve(alone).values()]
    assert losses[-1] < losses[0] - 0.1
    for stage in (1, 3):
        made = config(stage)
        made.checkpoint.every_steps = 3
        plan = tiny_plan(made, 2)
        whole = RunPaths(tmp_path / str(stage))
        train_cases(2, [Case(with_stop(plan, 3), whole)])
        train_cases(2, [Case(plan, whole, attempt=2)])
        assert_same_curve(whole, alone, norm=1e-4)


def test_a_run_on_stages_ends_early_as_on_one_process(tmp_path):
    """The learning rate is too small to move a weight, so no evaluation improves on the first."""

    def early(**layout):
        return clipped(
            steps=8,
            training__evaluation_samples=4,
            training__evaluate_every_steps=1,
            training__stop_patience=2,
            optimizer__lr=1e-30,
            checkpoint__at_end=True,
            **layout,
        )

    for name, layout in (("pipeline", PIPELINE), ("tensor", TENSOR)):
        run = trained(tmp_path / name, early(**layout), 2)
        end = read_events(run.events)[-1]
        assert (end["event"], end["reason"], end["step"]) == ("end", "no_improvement", 3)
        newest, _ = checkpoints.newest_checkpoint(run)
        assert newest is not None and newest.step == 3
        assert newest.patience["evaluations_since"] == 2


@pytest.mark.slow
def test_a_stable_phase_is_extended_on_another_layout(tmp_path):
    """The checkpoint at the end of the stable phase, written by data ranks, resumes on tensor ranks
    and on pipeline stages.
    """

    def wsd(steps, **layout):
        config = clipped(steps=steps, **layout)
        config.schedule = new_section("schedule", "wsd", warmup_steps=2, decay_steps=2)
        config.checkpoint.at_end = True
        return config

    longer = trained(tmp_path / "longer", wsd(8, **ALONE), 1)
    for name, layout in (("tensor", TENSOR), ("pipeline", PIPELINE)):
        run = trained(tmp_path / name, wsd(5, zero_stage__stage=2), 2)
        kept = [info for info in checkpoints.list_checkpoints(run) if info.kept_for]
        assert [(info.step, info.kept_for) for info in kept] == [(3, "stable_phase")]
        checkpoints.archive_later_checkpoints(run, 3, attempt=2)
        train_cases(2, [Case(tiny_plan(wsd(8, **layout), 2), run, attempt=2)])
        assert_same_curve(run, longer)
        rates = [event["learning_rate"] for event in steps_of(run) if event["attempt"] == 2]
        assert rates == [event["learning_rate"] for event in steps_of(longer)][3:]
