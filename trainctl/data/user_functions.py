"""User functions, named in the plan as module:function: imported and called here. No torch.

Only the plan's own keys (`trainer`, `model.factory`, `data.factory`) name a function, and only a
user sets them. Nothing else in a configuration is ever imported.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from sysconfig import get_paths
from types import TracebackType
from typing import Any

from trainctl.errors import ExitCode, TrainctlError, describe_exception
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import AttemptPaths, RunPaths

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Facts about a rank that a user's training function is given beside the plan.

    No process group is open yet. The environment has what torch and DeepSpeed need to open one.
    """

    rank: int
    world_size: int
    local_rank: int
    """Rank on this machine, which is the index of its device."""
    run_dir: Path
    """The run's directory, for files to keep."""
    attempt: int
    """Number of the attempt, from 1. Each restart or resume is a new attempt."""
    deepspeed_config: Path
    """File of the DeepSpeed JSON; `plan.deepspeed` is its content."""


def make_importable(folder: Path) -> None:
    """Put the folder of the user's functions first on the import path of this process.

    This is called just before a user function is imported. Until then no module in the folder can
    shadow one of Python's or of a package.
    """
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def load_user_function(key: str, reference: str) -> Callable[..., Any]:
    """Import the function `reference`; `key` is the config key that names it, for messages.

    Raises:
        TrainctlError: The module cannot be imported, or has no such function.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise TrainctlError(
            f"{key}={reference} cannot be imported: {in_words(error)}",
            hint="it is looked for in the folder of the first launch, in PYTHONPATH and among what "
            "is installed",
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "has no" if found is None else "is not a function but holds a value:"
        raise TrainctlError(f"{key}={reference}: {module.__file__} {what} {name}")
    function: Callable[..., Any] = found
    return function


def user_code_digest() -> str:
    """Return a digest of all imported files outside installed packages."""
    installed = {PACKAGE, *(Path(str(place)).resolve() for place in get_paths().values())}
    modules = list(sys.modules.values())
    names = {str(getattr(module, "__file__", None)) for module in modules}
    files = [Path(name).resolve() for name in sorted(names) if name.endswith(".py")]
    own = [file for file in files if installed.isdisjoint(file.parents) and file.is_file()]
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in own)).hexdigest()[:16]


def in_words(error: BaseException, file: str = "") -> str:
    """Describe an error of the user's code: its type, message, and the line that raised it.

    Args:
        file: File of the user's, whose line is named if a library that it called has failed.
    """
    text = describe_exception(error)
    place = _frame_location(error.__traceback__, file)
    return f"{text} ({place})" if place else text


def _frame_location(trace: TracebackType | None, file: str) -> str:
    """Return file and line of the last frame outside the import machinery and this file."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__
    ]
    frames = [frame for frame in frames if not frame.filename.endswith("importlib/__init__.py")]
    frames = [frame for frame in frames if frame.filename == file] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def run_trainer(plan: RunPlan, run: RunPaths, attempt: AttemptPaths) -> int:
    """Call the plan's `trainer` with the plan and this rank, and return the exit code.

    Exceptions of the function propagate: they end the process, with a traceback in the rank's log.
    """
    assert plan.config.trainer is not None
    function = load_user_function("trainer", plan.config.trainer)
    rank = Rank(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        run_dir=run.root,
        attempt=attempt.number,
        deepspeed_config=attempt.deepspeed,
    )
    try:
        function(plan, rank)
    except SystemExit as end:
        if end.code in (None, 0):
            return 0
        # Exit codes of the user's function are not trainctl's: any other code is a failed rank.
        print(f"error: {plan.config.trainer} ended with exit code {end.code}", file=sys.stderr)
        return int(ExitCode.training_failed)
    return 0
