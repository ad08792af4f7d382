"""Every number format trains, and goes on from a checkpoint bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
from rank_processes import (
    Case,
    curve,
    goes_on_exactly,
    tiny_config,
    tiny_plan,
    train_cases,
    with_stop,
)
from safetensors import safe_open

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    DataType,
    KernelsConfig,
    PrecisionConfig,
)
from trainctl.engines.deepspeed.engine import DeepSpeedLossScale, stop_at_smallest
from trainctl.errors import TrainctlError
from trainctl.hardware import Hardware
from trainctl.options.precision.fp8 import Fp8Scales
from trainctl.plans.schedule import Curve
from trainctl.rules.resolve import resolve
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

STEPS, HALF = 6, 3
LOWER_BY = 0.3
BF16, FP32 = DataType.bf16, DataType.fp32

FORMATS = {
    # ZeRO 1 has a wrapper of its own for it in DeepSpeed.
    "fp32-accumulation": (PrecisionConfig(gradient_accumulation=FP32), (1, 2, 3)),
    "low-memory": (PrecisionConfig(master_weights=BF16, optimizer_states=BF16), (2,)),
    "fp32-communication": (PrecisionConfig(communication=FP32), (0,)),
    "bf16-communication": (PrecisionConfig(compute=FP32, communication=BF16), (3,)),
    "autocast": (PrecisionConfig(autocast=True), (0, 3)),
    "autocast-bf16-communication": (PrecisionConfig(autocast=True, communication=BF16), (1,)),
    "fp8": (new_section("precision", "fp8", emulate_fp8=True), (3,)),
}
"""Number formats, and the ZeRO stages to try them at."""
QUICK = (("fp32-accumulation", 1),)
MASTERS = {"low-memory": torch.bfloat16}


def config(precision, stage, steps=STEPS):
    made = tiny_config(steps=steps, sequence_length=32)
    made.model.num_layers = 2
    made.precision = precision
    made.zero_stage.stage = stage
    made.optimizer.lr = 2e-3
    made.schedule.warmup_steps = 2
    made.checkpoint.every_steps, made.checkpoint.keep = HALF, 4
    return made


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if (name, stage) in QUICK else pytest.mark.slow)
        for name, (_, stages) in FORMATS.items()
        for stage in stages
    ],
)
def test_a_format_learns_and_resumes_exactly(tmp_path, name, stage):
    precision, _ = FORMATS[name]
    plan = tiny_plan(config(precision, stage), 2)
    assert plan.not_yet == ()
    run, _, _ = goes_on_exactly(tmp_path, plan, HALF)
    losses = [loss for loss, _ in curve(run).values()]
    assert losses[-1] < losses[0] - LOWER_BY
    assert saved_types(run) == {MASTERS.get(name, torch.float32)}


def saved_types(run):
    found = set()
    for path in list_checkpoints(run)[-1].path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.slow
def test_formats_differ_where_they_should(tmp_path):
    """Each option must reach the arithmetic: an ignored option would repeat another option's
    curve.
    """
    precisions = {
        "bf16": PrecisionConfig(),
        "accumulation": PrecisionConfig(gradient_accumulation=FP32),
        "low": PrecisionConfig(master_weights=BF16, optimizer_states=BF16),
        "autocast": PrecisionConfig(autocast=True),
        "autocast-wire": PrecisionConfig(autocast=True, communication=BF16),
        "fp8": new_section("precision", "fp8", emulate_fp8=True),
        "rows": new_section("precision", "fp8", emulate_fp8=True, fp8_scales=Fp8Scales.rowwise),
    }
    runs = {name: RunPaths(tmp_path / name) for name in precisions}
    train_cases(
        2,
        [
            Case(with_stop(tiny_plan(config(item, 2), 2), 4), runs[name])
            for name, item in precisions.items()
        ],
    )
    curves = {name: tuple(curve(run).items()) for name, run in runs.items()}
    assert len(set(curves.values())) == len(curves)
    first = {name: dict(items)[1][0] for name, items in curves.items()}
    assert first["low"] == first["bf16"] == first["accumulation"]
    assert max(first.values()) - min(first.values()) < 5e-3


def fp16_plan(stage, *, tokens=128, layers=3, **precision):
    """Plan for two GPUs, then move the plan to two CPU processes: the planner refuses fp16 on
    CPUs.
    """
    made = config(new_section("precision", "fp16", **precision), stage, steps=12)
    made.training.sequence_length, made.model.num_layers = tokens, layers
    made.optimizer.lr = 1e-3
    made.kernels = KernelsConfig(liger=False, compile=CompileKind.none)
    gpus = Hardware(name="gpu", accelerator=Accelerator.cuda, nodes=1, devices_per_node=2)
    plan = resolve(made, gpus).plan
    assert plan is not None
    return replace(plan, hardware=replace(gpus, accelerator=Accelerator.cpu))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "hysteresis"), [(1, 2), (3, 1)])
def test_fp16_skips_overflows_on_the_records_and_resumes_with_its_scale(
    tmp_path, stage, hysteresis
):
    """The loss scale starts too high, so the first updates are skipped. The schedule advances over
    skipped steps.
    """
    plan = fp16_plan(stage, initial_scale_power=24, hysteresis=hysteresis)
    run, _, _ = goes_on_exactly(tmp_path, plan, HALF, probe="format_probe:train_in_fp16")
    steps = [event for event in read_events(run.events) if event["event"] == "step"]
    skipped = [event["step"] for event in steps if event.get("skipped")]
    assert skipped == list(range(1, len(skipped) + 1)) and 3 <= len(skipped) <= 10
    scales = [event["loss_scale"] for event in steps]
    assert scales[0] == 2.0 ** (23 + hysteresis - 1)  # with 2 the first overflow is only noted
    assert scales[-1] == 2.0 ** (23 + hysteresis - len(skipped))
    for event in steps:
        factor = Curve.of(plan).factor(event["step"] - 1)
        assert event["learning_rate"] == plan.config.optimizer.lr * factor
        assert math.isfinite(event["loss"])
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.05
    unskipped = steps[len(skipped) :]
    assert all(0.5 < event["grad_norm"] < 10 for event in unskipped)


@pytest.mark.slow
def test_fp16_follows_the_curve_of_fp32(tmp_path):
    """Recorded losses and norms are unscaled, so they match fp32 up to rounding."""
    half, full = RunPaths(tmp_path / "half"), RunPaths(tmp_path / "full")
    plan = fp16_plan(2, tokens=64, layers=2, initial_scale_power=14)
    in_fp32 = replace(plan.config, precision=PrecisionConfig(compute=FP32))
    train_cases(2, [Case(plan, half)], probe="format_probe:train_in_fp16")
    train_cases(2, [Case(tiny_plan(in_fp32, 2), full)])
    for step, (loss, norm) in curve(full).items():
        assert curve(half)[step] == (pytest.approx(loss, abs=5e-3), pytest.approx(norm, rel=2e-2))


def test_an_overflow_at_the_smallest_scale_is_an_error():
    class Scaler:
        cur_scale = 1.0
        min_scale = 1.0

    scale = DeepSpeedLossScale(Scaler())
    with pytest.raises(ValueError, match="another"), stop_at_smallest(None):
        raise ValueError("another")
    scale.is_smallest = lambda: True
    with pytest.raises(TrainctlError, match="smallest loss scale, 1"), stop_at_smallest(scale):
        raise Exception("Current loss scale already at minimum")


def test_fp8_converts_the_matrices_of_blocks_and_nothing_else(tmp_path):
    plan = tiny_plan(config(new_section("precision", "fp8", emulate_fp8=True), 1), 1)
    (fp8,) = train_cases(1, [Case(plan, RunPaths(tmp_path / "8"))], probe="format_probe:fp8_layers")
    plain = tiny_plan(config(PrecisionConfig(), 1), 1)
    (bf16,) = train_cases(
        1, [Case(plain, RunPaths(tmp_path / "16"))], probe="format_probe:fp8_layers"
    )
    assert fp8["names"] == bf16["names"] and fp8["types"] == bf16["types"] == ["torch.bfloat16"]
    assert len(fp8["fp8"]) == 7 * plan.config.model.num_layers and bf16["fp8"] == []
    assert set(fp8["linear"]) - set(fp8["fp8"]) == {"lm_head"}
