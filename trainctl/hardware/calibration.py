"""Calibration: memory measured on this machine by `trainctl estimate-memory --measure`.

One JSON file in the user's cache folder (XDG base directories) has an entry for each kind of
device. Estimates work without it: an unreadable file, or a measurement with another version of
torch, is ignored.
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
    """Measured memory of a process that no formula predicts."""

    device: str
    """Name of the device, as in a plan."""
    date: str
    """Day of the measurement."""
    torch: str
    """Version of torch during the measurement."""
    runtime_bytes_alone: int | None = None
    """Device memory outside tensors of a single process: driver context, loaded kernels; on a CPU
    the interpreter and its libraries.
    """
    runtime_bytes_in_group: int | None = None
    """Device memory outside tensors of a rank among several, with its communication library."""
    fragmentation: float | None = None
    """Reserved over allocated memory, minus one; None on devices that reserve nothing."""

    def runtime_bytes(self, world_size: int) -> int | None:
        """Return the device memory outside tensors of a rank at this world size."""
        return self.runtime_bytes_alone if world_size == 1 else self.runtime_bytes_in_group


def device_name(hardware: Hardware) -> str:
    """Return the name of a plan's device without counts: ``h100-80g`` of ``8xh100-80g``."""
    return re.sub(r"^(\d+x)+", "", hardware.name)


def calibration_file() -> Path:
    """Return the path of the file; the variable TRAINCTL_CALIBRATION_FILE overrides it.

    Raises:
        TrainctlError: The user has no home directory (exit code 4), as in a container that runs
            under a bare user ID.
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
    """Return the device's measurement with the installed version of torch; None without one."""
    entry = _entries().get(device)
    if entry is None:
        return None
    try:
        found = Calibration(**entry)
    except TypeError:
        return None
    return found if found.torch == installed_torch() else None


def with_calibration(new: Calibration) -> dict[str, Any]:
    """Return the file's content with a new measurement; fields that it lacks keep their values."""
    old = read_calibration(new.device)
    entry = asdict(new)
    if old is not None:
        entry = {key: asdict(old)[key] if value is None else value for key, value in entry.items()}
    return {"schema": CALIBRATION_SCHEMA, "devices": _entries() | {new.device: entry}}


def installed_torch() -> str:
    """Return torch's version without importing it; empty if it is not installed."""
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
