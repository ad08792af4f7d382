"""Hosts of a launch over ssh: names, hostfiles, and the choice of hosts to use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from trainctl.errors import TrainctlError
from trainctl.models.local_path import local_path

HOST_NAME_HINT = (
    "letters, digits, dots and dashes, as in node-1, node1.example.org or user@10.0.0.1"
)

_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9]+)?")
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")
_SLOTS = re.compile(r"slots=(\d+)")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine reached by ssh."""

    name: str
    """Name or address as ssh takes it, with or without `user@`."""
    slots: int | None = None
    """Number of its devices; None if unknown."""
    devices: tuple[int, ...] | None = None
    """Indices of the devices to use; None uses the first ones, as many as needed."""

    @property
    def address(self) -> str:
        """Name without the user."""
        return self.name.rpartition("@")[2]


class HostChoice(Protocol):
    """Launcher keys that choose hosts."""

    hosts: list[str]
    hostfile: str | None
    """File with the hosts, instead of `hosts`."""
    include: str | None
    """Hosts to use, each optionally with its devices; None uses all."""
    exclude: str | None
    """Hosts, or devices of hosts, to leave out."""


def is_host_name(text: str) -> bool:
    """Whether a text can only be a host name. ssh would take a leading dash for an option."""
    return bool(_HOST.fullmatch(text) or _IPV6.fullmatch(text))


def is_interface_name(text: str) -> bool:
    """Whether the kernel could have a network interface of this name."""
    return bool(_INTERFACE.fullmatch(text))


def chosen_hosts(launcher: HostChoice, nodes: int, devices_per_node: int) -> tuple[Host, ...]:
    """Return the hosts that a plan's nodes run on, in order.

    Raises:
        TrainctlError: The hostfile is missing or malformed, or the hosts left are not `nodes`.
    """
    if launcher.hostfile is not None:
        hosts = read_hostfile(local_path(launcher.hostfile))
    else:
        hosts = [Host(name) for name in launcher.hosts]
    if launcher.include is not None:
        hosts = _keep_included(hosts, launcher.include)
    if launcher.exclude is not None:
        hosts = _drop_excluded(hosts, launcher.exclude, devices_per_node)
    hosts = [_require_devices(host, devices_per_node) for host in hosts]
    if len(hosts) != nodes:
        raise TrainctlError(
            f"the plan is for {nodes} nodes, and {_hosts_origin(launcher)} has {len(hosts)} to use",
            hint=f"hardware.nodes={len(hosts)}, or choose with launcher.include or .exclude",
        )
    return tuple(hosts)


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile of `host slots=n` lines, as DeepSpeed's; `#` begins a comment.

    Raises:
        TrainctlError: It cannot be read, a line is malformed, or a host appears twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise TrainctlError(
            f"launcher.hostfile={path} cannot be read: {reason}",
            hint="without the hosts nothing is started; `host slots=8` is a line of it",
        ) from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        slots = _SLOTS.fullmatch(words[1]) if len(words) == 2 else None
        if len(words) > 2 or (len(words) == 2 and not slots):
            raise TrainctlError(f"{where}: {line.strip()!r} is not `host slots=n`")
        _require_name(words[0], where)
        if slots and int(slots[1]) == 0:
            raise TrainctlError(f"{where}: {words[0]} has slots=0", hint="leave the line out")
        if any(host.name == words[0] for host in hosts):
            raise TrainctlError(f"{where}: {words[0]} is there twice")
        hosts.append(Host(words[0], int(slots[1]) if slots else None))
    if not hosts:
        raise TrainctlError(f"launcher.hostfile={path} names no host")
    return hosts


def _keep_included(hosts: Sequence[Host], text: str) -> list[Host]:
    chosen = _parse_selection("launcher.include", text, hosts)
    return [
        replace(host, devices=chosen[host.name] or None) for host in hosts if host.name in chosen
    ]


def _drop_excluded(hosts: Sequence[Host], text: str, devices_per_node: int) -> list[Host]:
    excluded = _parse_selection("launcher.exclude", text, hosts)
    left = []
    for host in hosts:
        if host.name not in excluded:
            left.append(host)
        elif excluded[host.name]:
            slots = range(host.slots or devices_per_node + len(excluded[host.name]))
            of = host.devices or tuple(slots)
            left.append(replace(host, devices=tuple(n for n in of if n not in excluded[host.name])))
    return left


def _parse_selection(key: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """Parse `node1@node2:0,2` into device indices by host; an empty tuple selects the whole host.

    A user's `@` stays part of the host's name.
    """
    names = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    # A name may contain @, and an IPv6 address colons: match known names, the longest first.
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    item = re.compile(rf"({known})(?::(\d+(?:,\d+)*))?(@|$)")
    position = 0
    while position < len(text):
        match = item.match(text, position)
        if match is None:
            raise TrainctlError(
                f"{key}: {text[position:]!r} names no host of {', '.join(names)}",
                hint="host names joined by @, each with its devices or without: node1@node2:0,2",
            )
        name, devices = match[1], tuple(int(n) for n in (match[2] or "").split(",") if n)
        slots = names[name].slots
        wrong = [number for number in devices if slots is not None and number >= slots]
        if wrong:
            raise TrainctlError(f"{key}: {name} has {slots} devices, from 0 on, and no {wrong[0]}")
        found[name] = tuple(sorted({*found.get(name, ()), *devices}))
        position = match.end()
    return found


def _require_devices(host: Host, devices: int) -> Host:
    offered = len(host.devices) if host.devices is not None else host.slots
    if offered is not None and offered < devices:
        raise TrainctlError(
            f"{host.name} offers {offered} devices, and the plan needs {devices} of each node",
            hint=f"hardware.devices_per_node={offered}, or leave the host out",
        )
    return host if host.devices is None else replace(host, devices=host.devices[:devices])


def _require_name(name: str, where: str) -> None:
    if not is_host_name(name):
        raise TrainctlError(f"{where}: {name!r} is not a host name", hint=HOST_NAME_HINT)


def _hosts_origin(launcher: HostChoice) -> str:
    return launcher.hostfile if launcher.hostfile is not None else "launcher.hosts"
