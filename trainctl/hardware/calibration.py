"""What was measured on this machine, for estimates on it: `trainctl estimate-memory --measure`.

One JSON file in the user's cache folder (XDG base directories), with an entry for each kind of
device. It is a help and no more: a file that cannot be read, or that another version of torch was
measured with, is as good as none.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainctl.config.reading import read_json
from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware.facts import Hardware

CALIBRATION_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Memory of a process that no formula gives."""

    device: str
    """Name of the device, as in a plan."""
    date: str
    """Day of the measurement."""
    torch: str
    """Version that it was measured with."""
    runtime_bytes_alone: int | None = None
    """What a single process has on its device outside of tensors: driver context, loaded kernels;
    on a CPU the interpreter and its libraries."""
    runtime_bytes_in_group: int | None = None
    """The same of one of several, with its communication library."""
    fragmentation: float | None = None
    """Reserved over allocated, minus one; None where nothing is reserved."""

    def runtime_bytes(self, world_size: int) -> int | None:
        """Of a process among so many."""
        return self.runtime_bytes_alone if world_size == 1 else self.runtime_bytes_in_group


def device_name(hardware: Hardware) -> str:
    """Return the name of a plan's device, without how many there are: ``h100-80g`` of
    ``8xh100-80g``."""
    return re.sub(r"^(\d+x)+", "", hardware.name)


def calibration_file() -> Path:
    """Where it is kept; the variable TRAINCTL_CALIBRATION_FILE names another place.

    Raises:
        TrainctlError: This user has no home (exit code 4): in a container he may be a mere number.
    """
    named = os.environ.get("TRAINCTL_CALIBRATION_FILE")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "trainctl" / "calibration.json"
    except RuntimeError:
        raise TrainctlError(
            "this user has no home directory to keep measurements in",
            hint="set HOME, XDG_CACHE_HOME or TRAINCTL_CALIBRATION_FILE",
            exit_code=ExitCode.environment,
        ) from None


def read_calibration(device: str) -> Calibration | None:
    """Return the entry of a device, if there is one that holds for what is installed here."""
    entry = _entries().get(device)
    if entry is None:
        return None
    try:
        found = Calibration(**entry)
    except TypeError:
        return None
    return found if found.torch == installed_torch() else None


def with_calibration(new: Calibration) -> dict[str, Any]:
    """Return the file's content with another measurement: what it did not measure stays as it
    was."""
    old = read_calibration(new.device)
    entry = asdict(new)
    if old is not None:
        entry = {key: asdict(old)[key] if value is None else value for key, value in entry.items()}
    return {"schema": CALIBRATION_SCHEMA, "devices": _entries() | {new.device: entry}}


def installed_torch() -> str:
    """Version of torch, without importing it; empty if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _entries() -> dict[str, Any]:
    try:
        content = read_json(calibration_file())
    except (OSError, ValueError, TrainctlError):
        return {}
    is_ours = isinstance(content, dict) and content.get("schema") == CALIBRATION_SCHEMA
    devices = content.get("devices") if is_ours else None
    return devices if isinstance(devices, dict) else {}
