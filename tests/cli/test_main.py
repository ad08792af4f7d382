"""The error boundary: what a user sees, on which stream, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from trainctl import __version__
from trainctl.cli.main import COMMANDS, import_command, run
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding, Severity, TrainctlError
from trainctl.runs.directory import create_run


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """Run `validate` with a composition that raises."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("trainctl.launchers.planning.compose_config", fail)
    return run(["validate"])


def test_every_finding_is_shown_with_key_source_and_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        Finding(
            rule="TC001",
            key="optimizer.lr",
            message="must be above 0, not -1 [sic]",
            hint="3e-4",
            source="override optimizer.lr=-1",
        ),
        Finding(rule="TC002", message="odd", severity=Severity.warning),
    ]
    error = TrainctlError.from_findings(findings)
    assert raising(monkeypatch, error) == ExitCode.bad_input
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "warning[TC002]: odd",
        "error[TC001]: optimizer.lr: must be above 0, not -1 [sic]",
        "  set by: override optimizer.lr=-1",
        "  hint: 3e-4",
        "more: trainctl explain TC002 TC001",
        "error: 1 problem in this configuration",
    ]


def test_code_that_ends_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's function may call `sys.exit(0)`; the command has then done nothing, so it must
    fail.
    """
    assert raising(monkeypatch, SystemExit(0)) == ExitCode.environment
    assert "test_main.py" in (said := capsys.readouterr().err) and "SystemExit: 0" in said


def test_an_exception_that_cannot_be_printed_is_still_a_bug_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert raising(monkeypatch, Mute()) == ExitCode.internal_error
    assert "Mute: its message cannot be printed" in capsys.readouterr().err


@pytest.mark.parametrize("code", [ExitCode.does_not_fit, ExitCode.environment, ExitCode.run_state])
def test_the_exit_code_is_the_errors(
    code: ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(monkeypatch, TrainctlError("no", hint="do so", exit_code=code)) == code
    assert capsys.readouterr().err == (
        f"error: no\nhint: do so\nmore: trainctl explain {int(code)}\n"
    )


def test_an_interrupt_has_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert raising(monkeypatch, KeyboardInterrupt()) == 130


def test_a_bug_asks_for_a_report_and_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(monkeypatch, ZeroDivisionError("oh")) == ExitCode.internal_error
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "ZeroDivisionError: oh" in text
    assert "please report it" in text


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["lauch"], "No such command 'lauch'.", "did you mean 'launch'"),
        (["config", "shwo"], "No such command 'shwo'.", "did you mean 'show'?"),
        (["launch", "--model=x"], "No such option: --model", "without dashes: model=VALUE"),
        (["config", "why"], "Missing argument", "trainctl config why --help"),
        (["config"], "Missing command", "trainctl config --help"),
        (["launch", "--resume", "maybe"], "Invalid value for '--resume'", "--help"),
    ],
)
def test_usage_errors_exit_with_2_and_a_hint(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == ExitCode.bad_input
    captured = capsys.readouterr()
    assert captured.out == ""
    error, _, after = captured.err.partition("\nhint: ")
    assert error.startswith("error: ")
    assert message in error
    assert hint in after


def test_the_version_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr() == (f"trainctl {__version__}\n", "")


def test_help_wraps_where_the_terminal_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", "--help"]) == 0
    assert "plans with ZeRO 3 only. Exits with 3 if nothing fits." in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_listing_says_what_a_command_says_of_itself(name: str) -> None:
    _, _, summary = COMMANDS[name]
    assert import_command(name).help.partition("\n\n")[0] == summary


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "estimate-memory" in capsys.readouterr().out


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m trainctl config show recipe=tiny | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["runs", "ls"], ["runs", "logs", "--help"]], ids=" ".join)
def test_a_closed_pipe_of_a_table_or_help_is_no_error(tmp_path: Path, words: list[str]) -> None:
    create_run(RunConfig(), root=tmp_path / "runs")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "trainctl", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_descriptors_are_no_error(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m trainctl config show recipe=tiny >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path).returncode == 0


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "runs") + b"/\xff-\xc3\xa9"
    create_run(RunConfig(), run_dir=Path(os.fsdecode(folder)))
    for encoding in ("utf-8", "ascii"):
        done = subprocess.run(
            [sys.executable, "-m", "trainctl", "runs", "ls", "--json"],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["runs"]
        assert os.fsencode(row["path"]) == folder


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ESTALE])
def test_errors_of_the_file_system_print_no_traceback(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(number, os.strerror(number), "/runs/r")
    assert raising(monkeypatch, error) == ExitCode.environment
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"error: /runs/r: {os.strerror(number)}"
    hint = "hint: look at the disk (dmesg), mount it for writing, then repeat the command"
    assert said[1:] == ([hint] if number == errno.EROFS else [])


def test_json_reports_the_findings_of_a_config_that_does_not_compose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise TrainctlError.from_findings([Finding(rule="TC003", key="a.b", message="no such key")])

    monkeypatch.setattr("trainctl.launchers.planning.compose_config", fail)
    assert run(["validate", "--json"]) == ExitCode.bad_input
    report = json.loads(capsys.readouterr().out)
    assert report["valid"] is False
    assert [(each["rule"], each["key"]) for each in report["findings"]] == [("TC003", "a.b")]


# ------------------------------------------------------------------ places of this machine


def path_parameters() -> Iterator[tuple[Any, Any]]:
    """Yield each command with each parameter that is a path."""
    commands = [import_command(name) for name in COMMANDS]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        hints = get_type_hints(command.callback) if command.params else {}
        for parameter in command.params:
            hint = hints[parameter.name]
            if Path in (hint, *get_args(hint)):
                yield command, parameter


def test_no_parameter_takes_an_address_for_a_folder() -> None:
    found = list(path_parameters())
    assert len(found) > 40
    for command, parameter in found:
        context = command.context_class(command)
        for address in ("s3://b/r", "gs://b", "hf://a/b", "file:///tmp/x"):
            with pytest.raises(TrainctlError, match="is an address") as caught:
                parameter.callback(context, parameter, Path(address))
            assert caught.value.exit_code is ExitCode.bad_input


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["launch", "recipe=tiny", "--run-dir", "s3://b/r"], "mounted here"),
        (["export", "runs/x", "s3://b/x"], "mounted here"),
        (["sweep", "recipe=tiny", "--sweep-dir", "gs://b/x"], "mounted here"),
        (["plan", "--write", "file:///tmp/x.yaml"], "without the scheme: /tmp/x.yaml"),
        (["validate", "--config-dir", "hf://a/b"], "ORGANISATION/NAME"),
    ],
)
def test_an_address_leaves_no_folder_behind(
    arguments: list[str],
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == ExitCode.bad_input
    said = capsys.readouterr().err
    assert "is an address, and no place in a file system" in said and hint in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "recipe=tiny"],
        ["estimate-memory", "recipe=tiny"],
        ["plan"],
        ["config", "show", "recipe=tiny"],
        ["config", "diff", "tiny", "125m"],
        ["recipes"],
        ["doctor", "recipe=tiny"],
        ["launch", "recipe=tiny", "--dry-run"],
        ["sweep", "recipe=tiny", "optimizer.lr=1,2"],
        ["schedule", "show", "recipe=tiny"],
        ["data", "plan", "recipe=tiny"],
    ],
    ids=" ".join,
)
def test_a_current_folder_that_is_gone_is_reported(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(arguments) == ExitCode.environment
    captured = capsys.readouterr()
    assert captured.err.startswith("error: the current folder is not there any more")
    assert "Traceback" not in captured.err and not captured.out
