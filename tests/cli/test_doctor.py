"""`doctor`: what it shows, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.engines.patch_checks import TABLES
from trainctl.errors import ExitCode
from trainctl.hardware.host_checks import CHECKS


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "tiny"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "This machine, for 2xcpu"
    begin = lines.index("What it changes in other packages, or uses of their inside (why: --json)")
    assert begin == 1 + len(CHECKS) + len(TABLES)
    assert "  not needed  inside torchao" in lines
    assert all(line.startswith("  good        ") for line in lines[begin + 1 :])
    assert "  good        replaced  torch.nn.modules.module.Module.register_parameter" in lines
    assert any(line.startswith("  good        packages: torch ") for line in lines)
    assert err == ""


def test_what_is_wrong_has_a_fix_and_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    arguments = ["doctor", "recipe=tiny", "zero_stage=3", "offload=nvme"]
    arguments.append(f"offload.nvme_path={missing}")
    assert run(arguments) == ExitCode.environment
    err = capsys.readouterr().err
    assert f"error[TC132]: offload.nvme_path: {missing} does not exist" in err
    assert f"set by: offload.nvme_path={missing}" in err
    assert f"hint: mkdir -p {missing}" in err
    assert run([*arguments, "--json"]) == ExitCode.environment
    report = json.loads(capsys.readouterr().out)
    (check,) = [each for each in report["checks"] if each["name"] == "NVMe"]
    assert check["verdict"] == "error"
    assert check["findings"][0]["rule"] == "TC132"
    assert {each["verdict"] for each in report["checks"]} >= {"good", "not needed", "error"}
    assert len(report["uses"]) == sum(len(table.uses) for table in TABLES)
    (use,) = [each for each in report["uses"] if each["name"].endswith("_no_gather_coalesced")]
    assert use["is_needed"] and use["difference"] == "" and use["read_in"] == ["0.19.8"]


def test_launch_looks_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["launch", "recipe=tiny", "zero_stage=3", "offload=nvme"]
    arguments += [f"offload.nvme_path={tmp_path / 'none'}", "--run-dir", str(tmp_path / "run")]
    assert run(arguments) == ExitCode.environment
    assert "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
