"""Checks of folders: the disk for offloaded states, free space, and owners of caches."""

from __future__ import annotations

import mmap
import os
import pwd
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from trainctl.config.quantities import disk_text
from trainctl.config.reading import local_path
from trainctl.config.schema import OffloadDevice, RunConfig
from trainctl.errors import Finding
from trainctl.hardware.detect import Hardware, error_finding, warning_finding

PROBE_BYTES = 1 << 20

_MEMORY = frozenset({"tmpfs", "ramfs"})
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "fuse.sshfs"})
"""Types of file systems that other machines share."""


def check_nvme(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a faulty `offload.nvme_path`: write and read back a block, as DeepSpeed's async_io does.

    The block bypasses the page cache (O_DIRECT) where the file system allows it.
    """
    offload = config.offload
    if OffloadDevice.nvme not in (offload.optimizer, offload.parameters) or not offload.nvme_path:
        return
    key, folder = "offload.nvme_path", local_path(offload.nvme_path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        yield error_finding("TC132", key, f"{folder} {what}", f"mkdir -p {folder}, or name another")
        return
    try:
        is_direct = write_and_read_back(folder)
    except (OSError, ValueError) as error:
        yield error_finding(
            "TC132", key, f"{folder} does not work: {error}", "name a folder of a local disk"
        )
        return
    kind = filesystem_type(folder)
    if kind in _MEMORY:
        what = f"is {kind}: states offloaded to it stay in host memory"
    elif kind in REMOTE:
        what = f"is {kind}, a network file system: training waits for every block"
    elif not is_direct:
        what = f"({kind}) takes no direct I/O, which async_io uses"
    else:
        yield f"{folder} ({kind}) was written and read back"
        return
    yield warning_finding("TC132", key, f"{folder} {what}", "name a folder of a local NVMe drive")


def check_root_caches(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find root's caches that another user can change: root loads text and operators from them."""
    if os.geteuid() != 0:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = {
        os.environ.get("TRAINCTL_CACHE_DIR") or f"{caches}/trainctl",
        os.environ.get("TORCH_EXTENSIONS_DIR") or f"{caches}/torch_extensions",
    }
    for name in sorted(named):
        if str(local_path(name)).startswith("~"):  # a user without a home
            continue
        path = local_path(name).absolute()
        folder = next((each for each in (path, *path.parents) if each.exists()), path)
        try:
            owner = folder.stat().st_uid
        except OSError:
            continue
        if owner != 0:
            yield warning_finding(
                "TC460",
                "",
                f"root keeps caches in {path}, and {folder} belongs to user {_user(owner)}, who "
                "can change what root trains on and loads",
                f"start as {_user(owner)}, or set HOME, XDG_CACHE_HOME or TRAINCTL_CACHE_DIR to a "
                "folder of root's",
            )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def lacking_space(free_bytes: int, needed_bytes: int | None, where: str) -> Iterator[Finding]:
    """Find a disk with too little free space for a checkpoint; nothing if its size is unknown."""
    if needed_bytes is not None and free_bytes < needed_bytes:
        yield error_finding(
            "TC196",
            "",
            f"a checkpoint takes {disk_text(needed_bytes)}, and {where} has "
            f"{disk_text(free_bytes)} free",
            "free space, or name a directory on another disk with --run-dir",
        )


def write_and_read_back(folder: Path) -> bool:
    """Write a block to a temporary file in the folder, read it back, compare, and remove the file.

    Returns:
        Whether both bypassed the page cache (O_DIRECT), as far as the file system says.

    Raises:
        OSError: The folder cannot be written or read.
        ValueError: The block read is not the block written.
    """
    written = os.urandom(PROBE_BYTES)
    descriptor, name = tempfile.mkstemp(prefix=".trainctl-probe-", dir=folder)
    os.close(descriptor)
    try:
        # Direct I/O needs an aligned buffer; an anonymous mapping is one.
        with mmap.mmap(-1, PROBE_BYTES) as buffer:
            descriptor, is_direct = _open_direct(name)
            try:
                buffer[:] = written
                if os.pwrite(descriptor, buffer, 0) != PROBE_BYTES:
                    raise OSError("a block was written only in part")
                os.fsync(descriptor)
                buffer[:] = bytes(PROBE_BYTES)
                os.preadv(descriptor, [buffer], 0)
                if buffer[:] != written:
                    raise ValueError("what is read back is not what was written")
            finally:
                os.close(descriptor)
    finally:
        with suppress(OSError):
            Path(name).unlink()
    return is_direct


def _open_direct(name: str) -> tuple[int, bool]:
    with suppress(OSError):
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    return os.open(name, os.O_RDWR), False


def filesystem_type(folder: Path) -> str:
    """Return the type of the file system that a folder is on; empty if unknown."""
    path = folder.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[each] for each in (path, *path.parents) if each in mounts), "")
