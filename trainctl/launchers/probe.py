"""`python -m trainctl.launchers.probe`: answers a launcher's questions over ssh. No torch.

A line of JSON on stdin is a question, a line on stdout its answer: first the facts, then whether
this host reaches the other hosts and sees their files. It ends when stdin ends.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.extras import package_version
from trainctl.config.schema import RunConfig
from trainctl.errors import TrainctlError
from trainctl.hardware import Hardware, builds
from trainctl.hardware.detect import visible_devices
from trainctl.hardware.devices import this_machine
from trainctl.runs.network import addresses_of, interface_of, outgoing_address, outgoing_interface
from trainctl.runs.provenance import file_digest

PACKAGES = ("trainctl", "torch", "deepspeed", "transformers")
"""Packages whose versions must be the same on all hosts."""

_CONNECT_SECONDS = 5.0
_VISIBLE_SECONDS = 10.0
"""Longest time for a file written elsewhere to appear: network file systems cache names."""

_MANY = 64


def main() -> int:
    """Answer questions until stdin ends."""
    probe = Probe()
    try:
        for line in sys.stdin:
            print(json.dumps(probe.answer(json.loads(line))), flush=True)
    finally:
        probe.close()
    return 0


class Probe:
    """Answers questions; keeps a socket that the other hosts connect to, and a file to be seen."""

    def __init__(self) -> None:
        self._address: str | None = None
        self._listener: socket.socket | None = None
        self._written: Path | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer one question: `facts` or `peers`."""
        if "facts" in question:
            return self._facts(**question["facts"])
        return self._peers(**question["peers"])

    def close(self) -> None:
        """Remove the file and close the socket."""
        if self._written is not None:
            with suppress(OSError):
                self._written.unlink()
        if self._listener is not None:
            self._listener.close()

    def _facts(
        self,
        interface: str | None,
        port: int | None,
        folder: str,
        mark: str,
        files: Sequence[str],
        config: dict[str, Any],
        hardware: dict[str, Any],
        environment: dict[str, str],
    ) -> dict[str, Any]:
        """Return the facts about this host; open the socket, and write the mark.

        Args:
            interface: Network interface to use; None is the one that ssh came in by.
            port: Port of the rendezvous, on the first host; 0 takes a free one, None on other
                hosts.
            folder: The run's folder, on storage that is to be shared.
            config: The plan's configuration, for what DeepSpeed will compile here.
            environment: Variables that the ranks will have, added to this host's.
        """
        name = interface or _ssh_interface()
        self._address = next(iter(addresses_of(name)), None) if name else None
        return {
            "host": socket.gethostname(),
            "packages": {package: package_version(package) for package in PACKAGES},
            "code": code_digest(),
            "files": {file: file_digest(Path(file)) for file in files},
            "machine": asdict(this_machine(visible_devices())),
            "time": time.time(),
            "interface": name,
            "address": self._address,
            "listens": self._listen(),
            "port": None if port is None else self._try_port(port),
            "storage": self._write(Path(folder), mark),
            "builds": _build_problems(config, hardware, environment),
        }

    def _peers(self, addresses: Sequence[tuple[str, int]], marks: Sequence[str]) -> dict[str, Any]:
        """Return the error of each unreachable address, and the marks that cannot be seen."""
        with ThreadPoolExecutor(_MANY) as pool:
            failures = list(pool.map(lambda peer: self._connect(*peer), addresses))
        unseen = set(marks)
        deadline = time.monotonic() + _VISIBLE_SECONDS
        folder = self._written.parent if self._written else None
        while folder is not None and unseen:
            with suppress(OSError):
                unseen -= {entry.name for entry in folder.iterdir()}
            if not unseen or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return {"failures": failures, "unseen": sorted(unseen)}

    def _listen(self) -> int | None:
        """Listen for the other hosts, and return the port; None if that fails."""
        if self._address is None:
            return None
        with suppress(OSError):
            self._listener = self._bind(0)
            return int(self._listener.getsockname()[1])
        return None

    def _bind(self, port: int) -> socket.socket:
        address = self._address or ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=4096)

    def _connect(self, address: str, port: int) -> str:
        """Return why an address cannot be reached from this host's interface; empty if it can."""
        source = None if self._address is None else (self._address, 0)
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS, source).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _try_port(self, port: int) -> dict[str, Any]:
        """Return a usable port, or why the port cannot be used."""
        try:
            with self._bind(port) as listener:
                return {"number": listener.getsockname()[1], "problem": ""}
        except OSError as error:
            return {"number": port, "problem": error.strerror or str(error)}

    def _write(self, folder: Path, mark: str) -> dict[str, Any]:
        """Write a mark to the folder; return its free space, or why it cannot be written to."""
        try:
            (folder / mark).write_text("")
            self._written = folder / mark
            return {"free_bytes": shutil.disk_usage(folder).free, "problem": ""}
        except OSError as error:
            return {"free_bytes": 0, "problem": error.strerror or str(error)}


def code_digest() -> str:
    """Return a checksum of trainctl's own source files: an installed copy may be edited."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _ssh_interface() -> str | None:
    """Return the interface that ssh came in by; if that is the loopback device, the outer one."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    address = connection[2] if len(connection) == 4 else (outgoing_address("192.0.2.1") or "")
    with suppress(ValueError):
        if not ipaddress.ip_address(address).is_loopback:
            return interface_of(address)
    return outgoing_interface("127.0.0.1")


def _build_problems(
    config: dict[str, Any], hardware: dict[str, Any], environment: dict[str, str]
) -> list[dict[str, str]]:
    """Return what keeps DeepSpeed from compiling here, in the ranks' environment."""
    own = dict(os.environ)
    try:
        os.environ.update(environment)  # CXX, CUDA_HOME, PATH and others
        found = builds.build_problems(from_plain(RunConfig, config), from_plain(Hardware, hardware))
    except (ValueError, TypeError, TrainctlError):  # other code, which is reported separately
        return []
    finally:
        os.environ.clear()
        os.environ.update(own)
    return [
        {"rule": each.rule, "key": each.key, "message": each.message, "hint": each.hint}
        for each in found
    ]


if __name__ == "__main__":
    sys.exit(main())
