"""States in host memory and on NVMe: the curve is that of states on the device, and they are saved
and loaded like any other, bit for bit. Each rank must end with exit code 0 (`fork_server`).

DeepSpeed compiles what it needs for this when it is first used, which takes minutes.
"""

from pathlib import Path

import pytest
from rank_processes import (
    Case,
    curve,
    goes_on_exactly,
    tiny_config,
    tiny_plan,
    train_cases,
    with_stop,
)

from trainctl.config.schema import DataType, OffloadDevice, PrecisionConfig
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import verify

STEPS, HALF = 6, 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


FP32 = PrecisionConfig(compute=DataType.fp32)
LOW = PrecisionConfig(master_weights=DataType.bf16, optimizer_states=DataType.bf16)
LOW_MASTERS = PrecisionConfig(master_weights=DataType.bf16)


def plan(stage, optimizer, parameters="none", nvme=None, *, precision=FP32, ratio=1.0):
    config = tiny_config(steps=STEPS)
    config.precision = precision
    config.checkpoint.every_steps = HALF
    config.optimizer.lr = 1e-3
    config.schedule.warmup_steps = 2
    config.optimizer.gradient_clipping = 0.5
    config.offload.ratio = ratio
    config.zero_stage.stage = stage
    config.offload.optimizer = OffloadDevice(optimizer)
    config.offload.parameters = OffloadDevice(parameters)
    if nvme is not None:
        # DeepSpeed swaps nothing below a megabyte.
        config.training.sequence_length = 32
        config.model.vocab_size, config.model.hidden_size = 1024, 512
        config.model.intermediate_size = 1024
        config.zero_stage.sub_group_size = 1_000_000
        config.zero_stage.max_live_parameters = 10_000_000
        config.offload.nvme_path = str(nvme)
        config.offload.buffer_size = 3_000_000
        config.offload.buffer_count = 32  # each parameter that is gathered holds one
        config.offload.max_in_cpu = 0
    return tiny_plan(config, 2)


def assert_resumes_exactly(folder, plan, probe=""):
    """Train whole, and again from half way; the whole run, and what `probe` returned."""
    whole, again, results = goes_on_exactly(folder, plan, HALF, probe=probe)
    for info in list_checkpoints(again):
        assert verify(info.path) == []
    return whole, results


def assert_same_curve(run, reference):
    for step, (loss, norm) in curve(reference).items():
        assert curve(run)[step] == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-5))
    losses = [loss for loss, _ in curve(reference).values()]
    assert losses[-1] < losses[0] - 0.2


def test_host_memory(tmp_path):
    reference = RunPaths(tmp_path / "reference")
    train_cases(2, [Case(plan(1, "none"), reference)])
    for stage, parameters in ((2, "none"), (3, "none"), (3, "cpu")):
        folder = tmp_path / f"{stage}-{parameters}"
        run, _ = assert_resumes_exactly(folder, plan(stage, "cpu", parameters))
        assert_same_curve(run, reference)


def test_a_part_on_the_device(tmp_path):
    """The parameters on the device have an optimizer of their own. It follows the schedule and is
    checkpointed.
    """
    reference = RunPaths(tmp_path / "reference")
    train_cases(2, [Case(plan(3, "none"), reference)])
    run, results = assert_resumes_exactly(
        tmp_path, plan(3, "cpu", ratio=0.5), probe="format_probe:train_partly_offloaded"
    )
    assert_same_curve(run, reference)
    for found in results:
        assert found["device"] > 0 and found["host"] > 0
        assert found["kinds"] == ["AdamW", "DeepSpeedCPUAdam"]


@pytest.mark.parametrize(
    ("precision", "stage"), [(LOW, 3), (LOW_MASTERS, 2)], ids=["states", "masters"]
)
def test_low_precision_masters_in_host_memory(tmp_path, precision, stage):
    run, _ = assert_resumes_exactly(tmp_path, plan(stage, "cpu", precision=precision))
    losses = [loss for loss, _ in curve(run).values()]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_nvme(tmp_path, parameters):
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("needs the headers of libaio (Debian's libaio-dev)")
    drive = tmp_path / "drive"
    drive.mkdir()
    made = plan(3, "nvme", parameters, drive)
    run = RunPaths(tmp_path / "crashed")
    left = train_cases(2, [Case(made, run)], probe="format_probe:die_with_swapped_files")[0]
    assert left and all(Path(path).exists() for path in left)
    # Another run beside it, with the same drive, touches nothing of it and leaves nothing.
    assert_resumes_exactly(tmp_path, made)
    assert all(Path(path).exists() for path in left)
    assert len(list(drive.iterdir())) == 1
    # The next launch of the run that crashed does.
    train_cases(2, [Case(with_stop(made, 1), run, attempt=2)])
    assert list(drive.iterdir()) == []
