"""Tests of a machine's measured figures, and of estimates that use them."""

from __future__ import annotations

import json
import pwd
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.config.extras import package_version
from trainctl.config.schema import Accelerator, HardwareConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.hardware.builds import build_folders
from trainctl.hardware.resolve import (
    Calibration,
    calibration_file,
    device_name,
    merge_calibration,
    read_calibration,
)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "calibration.json"
    monkeypatch.setenv("TRAINCTL_CALIBRATION_FILE", str(path))
    return path


def _measured(**changes: object) -> Calibration:
    values = {"device": "cpu", "date": "2026-01-02", "torch": package_version("torch")}
    return Calibration(**{**values, **changes})  # type: ignore[arg-type]


def test_it_is_in_the_cache_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAINCTL_CALIBRATION_FILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_file() == tmp_path / "trainctl" / "calibration.json"


def test_a_user_without_a_home_has_no_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAINCTL_CALIBRATION_FILE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert read_calibration("cpu") is None
    with pytest.raises(TrainctlError, match="no home directory") as caught:
        calibration_file()
    assert caught.value.exit_code is ExitCode.environment
    assert build_folders("cpu_adam") == []


def test_each_measurement_adds_what_it_measured(file: Path) -> None:
    file.write_text(json.dumps(merge_calibration(_measured(runtime_bytes_alone=10))))
    file.write_text(json.dumps(merge_calibration(_measured(runtime_bytes_in_group=20))))
    file.write_text(json.dumps(merge_calibration(_measured(device="h100-80g", fragmentation=0.1))))
    cpu, gpu = read_calibration("cpu"), read_calibration("h100-80g")
    assert cpu is not None and (cpu.runtime_bytes(1), cpu.runtime_bytes(8)) == (10, 20)
    assert gpu is not None and gpu.runtime_bytes(1) is None and gpu.fragmentation == 0.1


DAMAGED = (
    "",
    "[]",
    "{}",
    '{"schema": 2, "devices": {"cpu": {}}}',
    '{"schema": 1, "devices": 3}',
    '{"schema": 1, "devices": {"cpu": {"date": "x"}}}',
    "\x00",
)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_file_that_is_no_calibration_is_as_good_as_none(file: Path, content: str) -> None:
    file.write_text(content)
    assert read_calibration("cpu") is None
    assert merge_calibration(_measured(runtime_bytes_alone=1))["devices"]["cpu"]["date"]


def test_what_another_torch_was_measured_with_does_not_hold(file: Path) -> None:
    old = _measured(torch="1.0", runtime_bytes_alone=10)
    file.write_text(json.dumps(merge_calibration(old)))
    assert read_calibration("cpu") is None


def test_only_devices_that_are_here_are_calibrated(file: Path) -> None:
    for device in ("cpu", "h100-80g"):
        new = _measured(device=device, runtime_bytes_alone=123, runtime_bytes_in_group=456)
        file.write_text(json.dumps(merge_calibration(new)))
    cpu = HardwareConfig(name="cpu", accelerator=Accelerator.cpu, devices_per_node=2)
    assert resolve_hardware(cpu).runtime_bytes == 456
    assert resolve_hardware(cpu, calibrated=False).runtime_bytes is None
    far = HardwareConfig(name="h100-80g", accelerator=Accelerator.cuda, nodes=2, devices_per_node=8)
    assert resolve_hardware(far).runtime_bytes is None


@pytest.mark.parametrize(
    ("name", "device"),
    [("8xh100-80g", "h100-80g"), ("2x8xrtx-4090-24g", "rtx-4090-24g"), ("cpu", "cpu")],
)
def test_a_device_has_its_name_without_the_count(name: str, device: str) -> None:
    from dataclasses import replace

    hardware = replace(resolve_hardware(HardwareConfig(accelerator=Accelerator.cpu)), name=name)
    assert device_name(hardware) == device


def test_an_estimate_uses_it_says_so_and_can_leave_it(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["estimate-memory", "recipe=tiny", "--json"]
    assert run(arguments) == 0
    before = json.loads(capsys.readouterr().out)
    size = before["components"]["runtime"] + 2**30
    file.write_text(json.dumps(merge_calibration(_measured(runtime_bytes_in_group=size))))
    assert run(arguments) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["components"]["runtime"] == size
    assert after["device_peak_bytes"] == before["device_peak_bytes"] + 2**30
    assert "Calibrated on this machine on 2026-01-02." in after["notes"]
    assert run([*arguments, "--no-calibration"]) == 0
    assert json.loads(capsys.readouterr().out) == before
