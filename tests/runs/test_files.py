from __future__ import annotations

import json
import math
import os
import resource
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import TINY
from made_runs import new_run

import trainctl as tc
from trainctl.runs.directory import new_attempt, read_plan
from trainctl.runs.files import (
    remove_stale_temporary,
    temporary_folder,
    temporary_path,
    write_json,
    write_text,
)
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter, read_events


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    write_json(path, {"x": "ü", "y": [0.1]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"x": "ü", "y": [0.1]}
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_json_has_no_nan_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, [1])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, math.nan)
    assert path.read_text() == "[\n  1\n]\n"


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from trainctl.runs.files import write_text\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_text(Path(sys.argv[1]), 'new' * 1000)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert "OSError: [Errno 27]" in result.stderr
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.txt"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_path_of_any_bytes_is_read_back_from_json(tmp_path: Path) -> None:
    folder = os.fsdecode(b"/runs/\xff-\xc3\xa9\\udcff")
    path = tmp_path / "a.json"
    write_json(path, folder)
    assert json.loads(path.read_text(encoding="utf-8")) == folder
    with EventWriter(tmp_path / "events.jsonl", 1) as writer:
        writer.write("checkpoint", path=folder)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["path"] == folder


def test_a_signals_handler_may_write_the_same_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the same pid in another container may write it, too."""
    path = tmp_path / "stop"
    sync = os.fsync

    def handler_comes(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_json(path, "of the handler")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", handler_comes)
    write_json(path, "of the program")
    assert json.loads(path.read_text()) == "of the program"
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from pathlib import Path
from trainctl.runs import files
files.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
files.write_text(Path(sys.argv[1]), "new")
"""


def test_what_killed_writers_left_is_swept_by_the_one_rule_of_names(tmp_path: Path) -> None:
    for name in ("tensorboard.json", "csv.json"):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / name)])
    temporary_path(tmp_path / "step-1", "removed").mkdir()
    (tmp_path / "kept.tmp").touch()
    assert len(list(tmp_path.iterdir())) == 4
    remove_stale_temporary(tmp_path, "csv.json")
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 3 and not any("csv" in name for name in left)
    remove_stale_temporary(tmp_path, before=time.time() - 60)  # somebody may still be writing them
    assert len(list(tmp_path.iterdir())) == 3
    remove_stale_temporary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.tmp"]
    remove_stale_temporary(tmp_path / "nowhere")


def test_temporary_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "trainctl-foreign"
    foreign.mkdir()
    command = (
        "import os, signal\nfrom trainctl.runs.files import temporary_folder\n"
        "with temporary_folder() as folder:\n"
        "    (folder / 'plan.json').write_text('{}')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", command], env=environment)
    (left,) = set(tmp_path.iterdir()) - {foreign}
    assert (left / "plan.json").is_file()
    with temporary_folder() as held:
        assert not left.exists()
        with temporary_folder() as other:
            assert held.is_dir() and other.is_dir()
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_launch_sweeps_what_killed_writers_left(tmp_path):
    run = new_run(tmp_path / "run")
    loggers = run.companion("tensorboard").folder
    loggers.mkdir()
    old = [run.root / ".status.json.1.tmp", loggers / ".mirror.json.1.tmp"]
    recent = loggers / ".mirror.json.2.tmp"  # another process may be writing it
    for path in (*old, recent):
        path.write_text("half")
    for path in old:
        os.utime(path, (0, 0))
    new_attempt(run, read_plan(run.attempt(1).plan))
    assert not any(path.exists() for path in old) and recent.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_every_file_of_a_run_is_its_owners_alone(tmp_path):
    before = os.umask(0o022)
    try:
        steps = ("training.steps=2", "checkpoint.every_steps=2")
        made = tc.launch(*TINY, *steps, run_dir=tmp_path / "run")
    finally:
        os.umask(before)
    open_to_others = [
        str(path.relative_to(made.path))
        for path in made.path.rglob("*")
        if stat.S_IMODE(path.lstat().st_mode) & 0o077 and not path.is_symlink()
    ]
    assert RunPaths(made.path).checkpoints.is_dir() and open_to_others == []
