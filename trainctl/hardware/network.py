"""Checks of the network interfaces that ranks are told to use."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator

import psutil

from trainctl.config.schema import RunConfig
from trainctl.config.secrets import resolve_variables
from trainctl.errors import Finding
from trainctl.hardware.facts import Hardware
from trainctl.hardware.finding import problem, warning_finding

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def interfaces_exist(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find interfaces of NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME that are missing or down.

    With several nodes and neither variable set, the host's own name must not resolve to a loopback
    address.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    own = resolve_variables(config.launcher.environment, os.environ)
    named = False
    for variable in VARIABLES:
        value = own.get(variable, os.environ.get(variable))
        if not value:
            continue
        named = True
        missing = [entry for entry in _entries(variable, value) if not _matches(entry, up)]
        if missing:
            yield problem(
                "TC135",
                "launcher.environment" if variable in own else "launcher.forward_environment",
                f"{variable}={value}, and no interface of this machine that is up is called "
                f"{' or '.join(entry.lstrip('=') for entry in missing)}",
                f"one of {', '.join(sorted(up))}; or unset {variable}",
            )
        else:
            yield f"{variable}={value}"
    if hardware.nodes > 1 and not named:
        yield _own_address(sorted(up - {"lo"}))


def _own_address(up: list[str]) -> str | Finding:
    """Check the address of the host's own name, which gloo binds."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        is_loopback = ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError):
        address, is_loopback = "no address", True
    if not is_loopback:
        return f"{host} is {address}"
    return warning_finding(
        "TC135",
        "launcher.environment",
        f"this host's name, {host}, stands for {address}, which other nodes cannot reach",
        f"launcher.environment.GLOO_SOCKET_IFNAME={up[0] if up else 'NAME'}, and the same for "
        "NCCL_SOCKET_IFNAME; or mend /etc/hosts",
    )


def _entries(variable: str, value: str) -> list[str]:
    """Return the interfaces that must exist.

    NCCL accepts prefixes, ``=name``, and ``^name`` to exclude.
    """
    if value.startswith("^"):
        return []
    entries = [entry.strip() for entry in value.lstrip("=").split(",") if entry.strip()]
    is_exact = value.startswith("=") or variable.startswith("GLOO")
    return [f"={entry}" if is_exact else entry for entry in entries]


def _matches(entry: str, names: set[str]) -> bool:
    if entry.startswith("="):
        return entry[1:] in names
    return any(name.startswith(entry) for name in names)
