"""Command lines of ssh. All text that a remote shell reads is made and quoted here."""

from __future__ import annotations

import resource
import shlex
import sys
from collections.abc import Sequence

from trainctl.config.hosts import Host
from trainctl.options.launcher.ssh import SshConfig

CONNECT_SECONDS = 10
_OPEN_FILES = 65_536


def ssh(host: Host, launcher: SshConfig, module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs a module of trainctl on a host.

    It never prompts, uses no connection that another process made, and notices within
    `launcher.node_timeout_seconds` that the host is gone.
    """
    options = {
        "BatchMode": "yes",
        "ClearAllForwardings": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ControlMaster": "no",
        "ControlPath": "none",
        "ServerAliveCountMax": 3,
        "ServerAliveInterval": max(1, int(launcher.node_timeout_seconds / 3)),
    }
    return (
        "ssh",
        *(("-F", launcher.ssh_config) if launcher.ssh_config is not None else ()),
        *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
        "-T",
        "--",
        host.name,
        # -P: import nothing from the home directory there.
        shell_line((launcher.python or sys.executable, "-P", "-m", module, *arguments)),
    )


def allow_many_files() -> None:
    """Raise this process's limit of open files, as far as it may.

    Each host takes up to three files, and a usual limit of 1024 ends at 340 hosts.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def shell_line(argv: Sequence[str]) -> str:
    """Return a line that makes any shell exec the command, whatever characters it has."""
    return f"exec {shlex.join(argv)}"
