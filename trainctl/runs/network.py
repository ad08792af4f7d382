"""Interfaces and addresses of this machine that reach another machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil

_DISCARD_PORT = 9


def addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface, IPv4 first, without link-local ones; may be empty."""
    found = [
        entry.address
        for entry in psutil.net_if_addrs().get(interface, [])
        if entry.family in (socket.AF_INET, socket.AF_INET6)
        and not ipaddress.ip_address(entry.address.partition("%")[0]).is_link_local
    ]
    return sorted(found, key=lambda address: ":" in address)


def interface_of(address: str) -> str | None:
    """Return the interface that has the address; None if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def outgoing_address(host: str) -> str | None:
    """Return the source address of packets to a host; None without a route, or for an unknown name.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, _DISCARD_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def outgoing_interface(host: str) -> str | None:
    """Return the interface that reaches a host, also where the host is this machine.

    A machine reaches itself through the loopback device, which no other machine can use, and many
    machines resolve their own name to it. Then the interface of the default route is returned;
    without a default route, the only one that is not the loopback device.
    """
    source = outgoing_address(host)
    if source is None:
        return None
    if ipaddress.ip_address(source).is_loopback:
        source = outgoing_address("192.0.2.1")  # TEST-NET-1 (RFC 5737): takes the default route
        if source is None:
            return _only_outer()
    return interface_of(source)


def _only_outer() -> str | None:
    """Return the only interface besides the loopback device; None if there are several."""
    outer = [
        name
        for name in sorted(psutil.net_if_addrs())
        if any(not ipaddress.ip_address(address).is_loopback for address in addresses_of(name))
    ]
    return outer[0] if len(outer) == 1 else None
