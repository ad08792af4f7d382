"""States in host memory and on NVMe are saved and loaded like any other, bit for bit.

DeepSpeed compiles what it needs for this when it is first used, which takes minutes.
"""

from pathlib import Path

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.schema import DataType, OffloadDevice
from trainctl.runs.checkpoints import list_checkpoints, verify
from trainctl.runs.layout import RunPaths

STEPS, HALF = 6, 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def plan(stage, optimizer, parameters, nvme=None):
    config = tiny_config(steps=STEPS)
    config.precision.compute = DataType.fp32
    config.zero_stage.stage = stage
    config.offload.optimizer = OffloadDevice(optimizer)
    config.offload.parameters = OffloadDevice(parameters)
    if nvme is not None:
        # DeepSpeed swaps nothing below a megabyte.
        config.model.vocab_size, config.model.hidden_size = 1024, 512
        config.model.intermediate_size = 1024
        config.zero_stage.sub_group_size = 1_000_000
        config.zero_stage.max_live_parameters = 10_000_000
        config.offload.nvme_path = str(nvme)
        config.offload.buffer_size = 3_000_000
        config.offload.max_in_cpu = 0
    return tiny_plan(config, 2)


def assert_resumes_exactly(folder, plans):
    whole = [RunPaths(folder / f"whole-{index}") for index in range(len(plans))]
    parts = [RunPaths(folder / f"parts-{index}") for index in range(len(plans))]
    train_cases(2, [Case(*item) for item in zip(plans, whole, strict=True)])
    train_cases(
        2, [Case(with_stop(made, HALF), run) for made, run in zip(plans, parts, strict=True)]
    )
    train_cases(2, [Case(*item, attempt=2) for item in zip(plans, parts, strict=True)])
    for undisturbed, resumed in zip(whole, parts, strict=True):
        assert len(curve(resumed)) == STEPS
        assert curve(resumed) == curve(undisturbed)
        for info in list_checkpoints(resumed):
            assert verify(info.path) == []


def test_host_memory(tmp_path):
    assert_resumes_exactly(
        tmp_path, [plan(1, "cpu", "none"), plan(2, "cpu", "none"), plan(3, "cpu", "cpu")]
    )


@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_nvme(tmp_path, parameters):
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("needs the headers of libaio (Debian's libaio-dev)")
    swapped = tmp_path / "nvme"
    assert_resumes_exactly(tmp_path, [plan(3, "nvme", parameters, swapped)])
    assert any(swapped.rglob("*.swp"))
