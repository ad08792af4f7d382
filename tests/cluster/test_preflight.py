"""Tests of the preflight's messages and exit codes for faulty hosts, before anything starts."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
from commands import TINY
from hosts import Cluster, Host

import trainctl

pytestmark = pytest.mark.cluster


def refused(
    cluster: Cluster,
    folder: Path,
    *overrides: str,
    code: int = 4,
    hosts: str = "[n1,n2]",
    hardware: str = "2x2xcpu",
) -> str:
    """Return the output of a launch that must be refused. It leaves no process, file or run."""
    said = cluster.trainctl(
        "launch", *TINY, f"hardware={hardware}", "launcher=ssh", f"launcher.hosts={hosts}",
        f"launcher.ssh_config={cluster.settings}", *overrides, "--run-dir", folder / "run",
        cwd=folder, code=code,
    )  # fmt: skip
    assert not (folder / "run").exists()
    assert not list(folder.glob(".trainctl*"))
    cluster.assert_clean()
    return said


@contextmanager
def mounted(host: Host, what: Path | str, where: Path) -> Iterator[None]:
    """Mount one file or folder over another on this host alone."""
    if what == "tmpfs":
        host.run("mount", "-t", "tmpfs", "tmpfs", where)
    else:
        host.run("mount", "--bind", what, where)
    try:
        yield
    finally:
        host.run("umount", where)


def test_a_host_that_cannot_be_reached_and_one_with_another_key(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.write_known_hosts(n2="n1")
    try:
        said = refused(cluster, tmp_path, hosts="[n1,n2,nowhere,n0]", hardware="4x1xcpu")
    finally:
        cluster.write_known_hosts()
    assert "TC181" in said and "n2: its host key is not the one that ssh knows" in said
    assert "ssh-keygen -R n2" in said
    assert "TC180" in said and "nowhere cannot be reached" in said
    assert "error: 2 problems" in said


def test_a_host_that_does_not_answer_is_given_up(cluster: Cluster, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(
        f'#!/bin/sh\n[ $(hostname) = n2 ] && exec sleep 7\nexec {sys.executable} "$@"\n'
    )
    slow.chmod(0o755)
    start = time.monotonic()
    said = refused(cluster, tmp_path, f"launcher.python={slow}", "launcher.preflight_seconds=4")
    assert "n2 did not answer within 4 s" in said
    assert time.monotonic() - start < 60


def test_another_version_another_code_and_no_trainctl(cluster: Cluster, tmp_path: Path) -> None:
    n1, n2 = cluster.nodes
    found = next(path.locate() for path in metadata.files("torch") or () if path.name == "METADATA")
    other = tmp_path / "METADATA"
    other.write_text(re.sub(r"(?m)^Version: .*$", "Version: 0.1.2", Path(str(found)).read_text()))
    source = Path(trainctl.__file__)
    edited = tmp_path / "edited.py"
    edited.write_text(source.read_text() + "\n# changed on one host only\n")
    with mounted(n2, other, Path(str(found))), mounted(n1, edited, source):
        said = refused(cluster, tmp_path)
    version = metadata.version("torch")
    assert f"TC184]: launcher.hosts: n2 has torch 0.1.2, and this machine {version}" in said
    assert "TC185]: launcher.hosts: n1 has another code of trainctl" in said

    said = refused(cluster, tmp_path, "launcher.python=/nowhere/python")
    assert said.count("[TC183]") == 2 and "trainctl cannot be started there" in said


def test_another_version_of_the_user_s_own_code(cluster: Cluster, tmp_path: Path) -> None:
    """Modules that the script imports are compared too, and missing modules are named."""
    n1, n2 = cluster.nodes
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "own.py").write_text("import helper\nfrom parts import one, other\n")
    (tmp_path / "helper.py").write_text("import json\n")
    (tmp_path / "unrelated.py").write_text("")
    for name in ("__init__", "one", "other"):
        (parts / f"{name}.py").write_text("")
    edited = tmp_path / "edited"
    edited.write_text("import json  # changed on one host only\n")
    with (
        mounted(n1, edited, tmp_path / "helper.py"),
        mounted(n1, edited, tmp_path / "unrelated.py"),
        mounted(n2, "tmpfs", parts),
    ):
        said = refused(cluster, tmp_path, "script=own.py")
    assert said.count("[TC194]") == 2 and "error: 2 problems" in said
    assert f"n1 has another version of {tmp_path}/helper.py\n" in said
    lacking = ", ".join(f"{parts}/{name}.py" for name in ("__init__", "one", "other"))
    assert f"n2 does not have {lacking}\n" in said


def test_a_taken_port_and_an_interface_that_does_not_reach(
    cluster: Cluster, tmp_path: Path
) -> None:
    n1, n2 = cluster.nodes
    n2.run("ip", "link", "add", "lonely0", "type", "bridge")
    n2.run("ip", "address", "add", "10.199.3.7/24", "dev", "lonely0")
    n2.run("ip", "link", "set", "lonely0", "up")
    taken = n1.start(
        sys.executable, "-c",
        f"import socket, time; s = socket.create_server(('{n1.address}', 29500)); time.sleep(300)",
    )  # fmt: skip
    try:
        said = cluster.trainctl(
            "launch", *TINY, "hardware=2x2xcpu", "launcher=ssh", "launcher.hosts=[n1,n2]",
            f"launcher.ssh_config={cluster.settings}", "launcher.interfaces={n2: lonely0}",
            "--run-dir", tmp_path / "run",
            cwd=tmp_path, code=4,
        )  # fmt: skip
    finally:
        taken.kill()
        taken.wait()
        n2.run("ip", "link", "del", "lonely0")
    cluster.assert_clean()
    assert "TC189]: launcher.port: port 29500 on n1 cannot be used: Address already in use" in said
    assert "TC192" in said
    assert "n2 by lonely0 (10.199.3.7) does not reach n1" in said
    assert f"n1 by eth0 ({n1.address}) does not reach n2 (10.199.3.7)" in said

    said = refused(cluster, tmp_path, "launcher.interface=eth7")
    assert said.count("has no interface eth7 with an address") == 2


def test_storage_that_is_not_shared_and_not_there(cluster: Cluster, tmp_path: Path) -> None:
    _, n2 = cluster.nodes
    with mounted(n2, "tmpfs", tmp_path):
        said = refused(cluster, tmp_path)
    assert "TC187" in said
    assert "n2 does not see what n1, this machine wrote where the run is kept" in said
    assert "n1 does not see what n2 wrote where the run is kept" in said

    inside = tmp_path / "inside"
    inside.mkdir()
    with mounted(n2, "tmpfs", tmp_path):
        said = cluster.trainctl(
            "launch", *TINY, "hardware=2x2xcpu", "launcher=ssh", "launcher.hosts=[n1,n2]",
            f"launcher.ssh_config={cluster.settings}", "--run-dir", inside / "run",
            cwd=tmp_path, code=4,
        )  # fmt: skip
    assert "n2 cannot write where the run is kept: No such file or directory" in said


def test_a_missing_hostfile_starts_nothing_here(cluster: Cluster, tmp_path: Path) -> None:
    said = refused(cluster, tmp_path, "launcher.hostfile=nowhere.txt", hosts="[]", code=2)
    assert "launcher.hostfile=nowhere.txt cannot be read: No such file or directory" in said


HOSTILE = [
    "$(touch PWNED)",
    "`touch PWNED`",
    "a;touch PWNED",
    "a b\ntouch PWNED",
    "-oProxyCommand=touch PWNED",
]


def test_hostile_names_of_hosts_execute_nothing(cluster: Cluster, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    for name in HOSTILE:
        said = refused(cluster, tmp_path, hosts=f"[n1,{as_value(name)}]", code=2)
        assert "is not a host name" in said
    for name in ("$(touch${IFS}PWNED)", "-oProxyCommand=touch${IFS}PWNED", "a;touch"):
        hostfile.write_text(f"n1 slots=2\n{name} slots=2\n")
        said = refused(cluster, tmp_path, f"launcher.hostfile={hostfile}", hosts="[]", code=2)
        assert f"{hostfile}:2: {name!r} is not a host name" in said
    assert not list(tmp_path.rglob("*PWNED*")) and not list(cluster.folder.rglob("*PWNED*"))


def as_value(text: str) -> str:
    """Return an override's value that composes to the text."""
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"
