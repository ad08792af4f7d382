"""Hardware: declared facts, detection, and the check before a local launch.

No GPU is at hand where these run, so `nvidia-smi` and `rocm-smi` are stand-ins: executables on PATH
that print what the real ones print.
"""

from __future__ import annotations

import os
import stat
import time

import psutil
import pytest

from trainctl.config.schema import Accelerator, DataType, HardwareConfig, RunConfig
from trainctl.errors import ExitCode, Finding, Severity
from trainctl.hardware import detect, resolve_hardware
from trainctl.hardware.devices import check_devices as devices_here

H100 = "{i}, GPU-{i}aaa-1, NVIDIA H100 80GB HBM3, 81559, 9.0"
T4 = "{i}, GPU-{i}bbb-1, Tesla T4, 15360, 7.5"
RTX = "{i}, GPU-{i}ccc-1, NVIDIA GeForce RTX 4090, 24564, 8.9"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a stand-in for a vendor's tool on PATH, alone."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    detect.query_tool.cache_clear()

    def put(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        detect.query_tool.cache_clear()

    yield put
    detect.query_tool.cache_clear()


def print_lines(*lines: str) -> str:
    return "cat <<'END'\n" + "\n".join(lines) + "\nEND"


def devices(line: str, count: int) -> str:
    return print_lines(*(line.format(i=i) for i in range(count)))


@pytest.mark.parametrize(
    ("line", "count", "name", "bf16", "fp8"),
    [
        (H100, 8, "8xh100-80g", True, True),
        (T4, 1, "1xt4-15g", False, False),
        (RTX, 2, "2xrtx-4090-24g", True, True),
    ],
)
def test_gpus_are_read_off_the_driver_s_tool(tool, line, count, name, bf16, fp8):
    tool("nvidia-smi", devices(line, count))
    hardware = resolve_hardware(HardwareConfig())
    assert hardware.name == name
    assert (hardware.accelerator, hardware.devices_per_node) == (Accelerator.cuda, count)
    assert hardware.device_memory_bytes == int(line.split(", ")[3]) * 2**20
    assert (hardware.supports_bf16, hardware.supports_fp8) == (bf16, fp8)
    assert hardware.detected
    assert hardware.host_memory_bytes == detect.host_memory_limit()


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("0,2", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("GPU-3aaa", 1), ("7", 0), ("1, 0 ,3", 3)],
)
def test_the_environment_says_which_are_visible(tool, monkeypatch, variable, expected):
    tool("nvidia-smi", devices(H100, 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert len(detect.visible_devices()) == expected
    hardware = resolve_hardware(HardwareConfig())
    assert hardware.accelerator is (Accelerator.cuda if expected else Accelerator.cpu)


def test_a_mixed_machine_is_planned_for_its_weakest_device(tool):
    tool("nvidia-smi", print_lines(H100.format(i=0), T4.format(i=1)))
    hardware = resolve_hardware(HardwareConfig())
    assert hardware.device_memory_bytes == 15360 * 2**20
    assert not hardware.supports_bf16


@pytest.mark.parametrize(
    "script", ["exit 9", "echo 'NVIDIA-SMI has failed because it could not talk to the driver'"]
)
def test_a_broken_tool_means_no_gpu(tool, script):
    tool("nvidia-smi", script)
    assert resolve_hardware(HardwareConfig()).name == "1xcpu"


def test_a_hanging_tool_is_given_up(tool, monkeypatch):
    tool("nvidia-smi", "exec sleep 60")
    monkeypatch.setattr(detect, "TOOL_TIMEOUT_SECONDS", 0.3)
    start = time.monotonic()
    assert detect.visible_devices() == ()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("line", "bf16", "fp32", "bandwidth"),
    [
        (H100, 989.4, 66.9, 3350.0),
        (T4, None, 8.1, 320.0),
        ("{i}, GPU-{i}, NVIDIA H100 PCIe, 81559, 9.0", None, None, None),
    ],
    ids=["H100", "T4", "another form of a known chip"],
)
def test_a_detected_device_has_the_rates_of_its_option(tool, line, bf16, fp32, bandwidth):
    tool("nvidia-smi", devices(line, 2))
    hardware = resolve_hardware(HardwareConfig())
    assert hardware.peak_tflops(DataType.bf16) == bf16
    assert hardware.peak_tflops(DataType.fp32) == fp32
    assert hardware.memory_bandwidth_gb_per_second == bandwidth


def test_a_declared_rate_wins_and_a_mixed_machine_has_none(tool):
    tool("nvidia-smi", devices(H100, 2))
    hardware = resolve_hardware(HardwareConfig(peak_tflops_bf16=800.0))
    assert hardware.peak_tflops(DataType.bf16) == 800.0
    assert hardware.peak_tflops(DataType.fp8) == 1978.9
    tool("nvidia-smi", print_lines(H100.format(i=0), T4.format(i=1)))
    assert resolve_hardware(HardwareConfig()).peak_tflops(DataType.fp16) is None


def test_amd_devices(tool, monkeypatch):
    card = '"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "206141652992"'
    tool("rocm-smi", print_lines(f'{{"card0": {{{card}}}, "card1": {{{card}}}, "system": {{}}}}'))
    hardware = resolve_hardware(HardwareConfig())
    assert (hardware.accelerator, hardware.name) == (Accelerator.rocm, "2xmi300x-192g")
    assert hardware.device_memory_bytes == 206141652992
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert resolve_hardware(HardwareConfig()).devices_per_node == 1


def test_a_cpu_s_processes_share_its_memory(tool):
    declared = HardwareConfig(name="cpu", accelerator=Accelerator.cpu, devices_per_node=4)
    hardware = resolve_hardware(declared)
    assert hardware.name == "4xcpu"
    assert hardware.host_memory_bytes == detect.host_memory_limit()
    assert hardware.device_memory_bytes == hardware.host_memory_bytes // 4
    assert resolve_hardware(HardwareConfig()).devices_per_node == 1


def declared_h100s(**facts):
    return HardwareConfig(
        name="h100-80g",
        accelerator=Accelerator.cuda,
        device_memory_bytes=81559 * 2**20,
        **facts,
    )


def test_declared_gpus_elsewhere_keep_what_is_unknown_unknown(tool):
    hardware = resolve_hardware(declared_h100s(devices_per_node=8, nodes=4))
    assert hardware.name == "4x8xh100-80g"
    assert hardware.world_size == 32
    assert hardware.device_memory_bytes == 81559 * 2**20
    assert hardware.host_memory_bytes is None
    assert not hardware.detected


def test_declared_gpus_here_have_this_host_s_memory(tool):
    tool("nvidia-smi", devices(H100, 8))
    assert resolve_hardware(declared_h100s(devices_per_node=8)).host_memory_bytes is not None
    assert resolve_hardware(declared_h100s(devices_per_node=16)).host_memory_bytes is None
    assert resolve_hardware(declared_h100s()).devices_per_node == 8
    tool("nvidia-smi", devices(T4, 8))
    assert resolve_hardware(declared_h100s(devices_per_node=8)).host_memory_bytes is None


def test_declared_facts_win_over_detected_ones(tool):
    tool("nvidia-smi", devices(H100, 8))
    config = declared_h100s(devices_per_node=2, host_memory_bytes=10**12, supports_fp8=False)
    hardware = resolve_hardware(config)
    assert (hardware.devices_per_node, hardware.host_memory_bytes) == (2, 10**12)
    assert not hardware.supports_fp8


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/job/a", {"job/memory.max": "2000", "job/a/memory.max": "max"}, 2000),
        ("0::/job/a", {"memory.max": "3000", "job/a/memory.max": "5000"}, 3000),
        ("0::/host/only", {"memory.max": "700"}, 700),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": "1000"}, 1000),
        ("4:memory:/x", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("2:cpu,cpuacct:/", {}, None),
    ],
)
def test_a_control_group_limits_the_host_s_memory(tmp_path, cgroup, files, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert detect.host_memory_limit(tmp_path) == (expected or psutil.virtual_memory().total)


def lacking(hardware):
    found = devices_here(RunConfig(), hardware)
    return [finding for finding in found if isinstance(finding, Finding)]


def test_a_plan_for_gpus_on_a_machine_without_any_is_stopped(tool):
    (finding,) = lacking(resolve_hardware(declared_h100s(devices_per_node=8)))
    assert finding.is_error and finding.exit_code is ExitCode.environment
    assert "8xh100-80g" in finding.message
    assert "hardware=auto" in finding.hint and "hardware=2xcpu" in finding.hint


def test_a_plan_for_more_gpus_than_are_visible_is_stopped(tool, monkeypatch):
    tool("nvidia-smi", devices(H100, 8))
    planned = resolve_hardware(declared_h100s(devices_per_node=8))
    assert lacking(planned) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (finding,) = lacking(planned)
    assert "shows 2 devices (CUDA_VISIBLE_DEVICES=0,1)" in finding.message
    assert finding.hint.startswith("hardware.devices_per_node=2")


def test_a_plan_for_larger_gpus_is_stopped(tool):
    tool("nvidia-smi", devices(RTX, 8))
    (finding,) = lacking(resolve_hardware(declared_h100s(devices_per_node=8)))
    assert "RTX 4090" in finding.message and finding.is_error


def test_more_processes_than_cores_is_a_warning():
    cores = len(os.sched_getaffinity(0))
    config = HardwareConfig(name="cpu", accelerator=Accelerator.cpu, devices_per_node=cores)
    assert lacking(resolve_hardware(config)) == []
    config.devices_per_node = cores + 1
    (finding,) = lacking(resolve_hardware(config))
    assert finding.severity is Severity.warning
