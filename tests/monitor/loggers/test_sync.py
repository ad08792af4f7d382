"""`trainctl runs sync`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import cursor, following, wait_for
from records_of_runs import append, draw, losses, new_run

from trainctl.cli.main import run as command
from trainctl.runs.layout import RunPaths

pytestmark = pytest.mark.usefixtures("own_options")


def rows(run: RunPaths) -> int:
    return len((run.root / "table" / "train.csv").read_text().splitlines()) - 1


def test_sync_sends_only_unsent_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path)
    sync = ["runs", "sync", str(run.root)]
    assert command(sync) == 0
    assert "it has no logger in logging.to" in capsys.readouterr().err
    append(run, draw(1, 30))
    assert command([*sync, "--to", "table"]) == 0
    assert capsys.readouterr().out == f"{run.root}: table is at step 30\n"
    assert rows(run) == len(losses(run)[0]) == 30
    (run.root / "table" / "train.csv").unlink()
    assert command([*sync, "--to", "table"]) == 0
    assert not (run.root / "table" / "train.csv").exists(), "sent already"
    assert command([*sync, "--to", "table", "--again"]) == 0
    assert rows(run) == 30


def test_sync_reports_why_it_cannot_send(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path)
    append(run, draw(2, 3))
    assert command(["runs", "sync", str(run.root), "--to", "tabel"]) == 4
    assert "logger has no kind 'tabel' here" in capsys.readouterr().err
    (run.root / "table").write_text("a file where its folder should be")
    assert command(["runs", "sync", str(run.root), "--to", "table"]) == 4
    told = capsys.readouterr().err
    assert "FileExistsError" in told or "NotADirectoryError" in told
    assert "not everything was sent: run: table" in told
    (run.root / "table").unlink()
    with following(run, "table"):
        wait_for(lambda: cursor(run, "table")["points"])
        assert command(["runs", "sync", str(run.root), "--to", "table"]) == 0
    assert "another process sends to table now" in capsys.readouterr().err
    shutil.rmtree(run.root / "loggers")
    (run.root / "loggers").touch()
    assert command(["runs", "sync", str(run.root), "--to", "table"]) == 4
    assert "cannot be written: Not a directory" in capsys.readouterr().err
