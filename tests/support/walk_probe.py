"""Recorder of call stacks between a launch and the first step, active in every importing process.

It writes a JSON line where a process starts another one (by `Popen`, `exec` or `fork`), and where a
rank makes its first optimizer step. A line names the process and the files of the frames on the
stack. `walk` joins the lines to the path from the first process to the step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER_VARIABLE = "TRAINCTL_WALK_FOLDER"
STEP_FILES = ("/torch/optim/", "/deepspeed/ops/")
"""Parts of the paths of files whose functions `step` update weights."""


def install() -> None:
    """Record this process and its forks from now on."""
    born = {"by": "exec", "parent": os.getppid()}
    parent = os.getpid()

    def record(kind: str, frame: FrameType | None, argv: Any = None) -> None:
        files: list[str] = []
        while frame is not None:
            files.insert(0, frame.f_code.co_filename)
            frame = frame.f_back
        line = {"pid": os.getpid(), "born": born, "own": sys.orig_argv, "kind": kind}
        line |= {"argv": argv, "files": files}
        with Path(os.environ[FOLDER_VARIABLE], str(os.getpid())).open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" or event == "os.exec":
            record("start", sys._getframe(1), [os.fsdecode(word) for word in arguments[1]])
        elif event == "os.fork":
            record("fork", sys._getframe(1))

    def before_fork() -> None:
        nonlocal parent
        parent = os.getpid()

    def in_fork() -> None:
        born.update(by="fork", parent=parent)
        sys.setprofile(profile)

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "step" and is_update(code.co_filename):
            sys.setprofile(None)
            record("step", frame)

    sys.addaudithook(hook)
    os.register_at_fork(before=before_fork, after_in_child=in_fork)


def is_update(file: str) -> bool:
    return any(part in file for part in STEP_FILES) and "lr_scheduler" not in file


def walk(folder: Path, package: Path) -> list[list[str]]:
    """Return the package's modules on each stack between the launch and the first rank's step."""
    lines = [json.loads(line) for file in folder.iterdir() for line in file.open()]
    (at, *_) = [line for line in lines if line["kind"] == "step"]
    stacks = [at]
    while True:
        starts = [line for line in lines if is_start(line, at)]
        if not starts:
            break
        at = starts[-1]
        stacks.insert(0, at)
    return [modules(stack["files"], package) for stack in stacks]


def is_start(line: dict[str, Any], child: dict[str, Any]) -> bool:
    """Return True if the line was written when the child's process was started."""
    if child["born"]["by"] == "fork":
        return bool(line["kind"] == "fork" and line["pid"] == child["born"]["parent"])
    is_parent = line["pid"] in (child["born"]["parent"], child["pid"])
    return bool(is_parent and line["argv"] == child["own"] and line["own"] != child["own"])


def modules(files: list[str], package: Path) -> list[str]:
    """Return the package's modules among the files, each once, outermost first."""
    inside = [Path(file) for file in files if Path(file).is_relative_to(package)]
    named = (".".join(file.relative_to(package.parent).with_suffix("").parts) for file in inside)
    return list(dict.fromkeys(named))
