"""Hosts: names that are nothing else, hostfiles, and what is chosen of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainctl.config.hosts import Host, chosen_hosts, is_host_name, is_interface_name
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.launcher.ssh import SshConfig


@pytest.mark.parametrize(
    "name",
    ["node-1", "n1.example.org", "user@10.0.0.1", "_gateway", "fe80::1%eth0", "me@2001:db8::7"],
)
def test_names_of_hosts(name: str) -> None:
    assert is_host_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "-oProxyCommand=id", "me@-oProxyCommand=id", "-", "$(id)", "`id`", "a b", "a;id",
        "a\nid", "n1\n", "a'b", 'a"b', "a/b", "ssh://a", "node-", "a|b", "me@@host", "é",
    ],
)  # fmt: skip
def test_invalid_host_names_are_refused(name: str) -> None:
    assert not is_host_name(name)


def test_names_of_interfaces() -> None:
    assert is_interface_name("enp3s0f1") and is_interface_name("bond0.100")
    for name in ("", "-a", "eth0;id", "a b", "eth0\n", "a" * 16):
        assert not is_interface_name(name)


HOSTFILE = """
# the first rack
node1 slots=8
node2 slots=8   # with a comment

me@node3 slots=4
node4
"""


def chosen(path: Path, nodes: int = 4, devices: int = 4, **settings: Any) -> list[Host]:
    path.write_text(HOSTFILE)
    return list(chosen_hosts(SshConfig(hostfile=str(path), **settings), nodes, devices))


def test_a_hostfile_as_deepspeed_has_it(tmp_path: Path) -> None:
    assert chosen(tmp_path / "hosts") == [
        Host("node1", 8), Host("node2", 8), Host("me@node3", 4), Host("node4"),
    ]  # fmt: skip
    assert chosen(tmp_path / "hosts")[2].address == "node3"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"include": "node1@node4"}, [("node1", None), ("node4", None)]),
        ({"include": "node2:1,3,5,7@me@node3"}, [("node2", (1, 3, 5, 7)), ("me@node3", None)]),
        ({"exclude": "me@node3@node1"}, [("node2", None), ("node4", None)]),
        (
            {"exclude": "node1:0,2@me@node3@node4"},
            [("node1", (1, 3, 4, 5)), ("node2", None)],
        ),
        (
            {"include": "node1@node2", "exclude": "node1:0"},
            [("node1", (1, 2, 3, 4)), ("node2", None)],
        ),
    ],
)
def test_include_and_exclude(
    tmp_path: Path, settings: dict[str, Any], expected: list[tuple[str, Any]]
) -> None:
    hosts = chosen(tmp_path / "hosts", 2, **settings)
    assert [(host.name, host.devices) for host in hosts] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=0\n", ":1: node1 has slots=0"),
        ("node1 slots=8 gpus\n", ":1: 'node1 slots=8 gpus' is not `host slots=n`"),
        ("a\nnode1 8\n", ":2: 'node1 8' is not"),
        ("node1\nnode1 slots=2\n", ":2: node1 is there twice"),
        ("$(id) slots=2\n", "is not a host name"),
        ("-oProxyCommand=id slots=2\n", "is not a host name"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_wrong_hostfile_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(TrainctlError) as caught:
        chosen_hosts(SshConfig(hostfile=str(path)), 1, 1)
    assert message in caught.value.message
    assert caught.value.exit_code is ExitCode.bad_input


def test_a_missing_hostfile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainctlError, match="cannot be read: No such file"):
        chosen_hosts(SshConfig(hostfile=str(tmp_path / "none")), 1, 1)


@pytest.mark.parametrize(
    ("nodes", "devices", "settings", "message"),
    [
        (3, 4, {}, "the plan is for 3 nodes, and .* has 4 to use"),
        (4, 8, {}, "me@node3 offers 4 devices, and the plan needs 8"),
        (1, 4, {"include": "node9"}, "launcher.include: 'node9' names no host of node1, node2"),
        (1, 4, {"include": "node1:8"}, "node1 has 8 devices, from 0 on, and no 8"),
        (1, 4, {"exclude": "node1:$(id)"}, "launcher.exclude: .* names no host"),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, nodes: int, devices: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainctlError, match=message):
        chosen(tmp_path / "hosts", nodes, devices, **settings)
