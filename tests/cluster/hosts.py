"""Several hosts on one machine: each a network, PID, mount and host-name namespace with its sshd.

A host's first process is its sshd, so when that is killed the kernel ends all that ran there. All
hosts share the file system, as hosts with network storage do; `Host.mount` changes one's view.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEEDED = ("ip", "sshd", "ssh", "ssh-keygen", "nsenter", "setpriv", "unshare")


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    return f"needs {', '.join(lacking)} (iproute2, openssh-server, util-linux)" if lacking else ""


def run(*argv: object) -> str:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


class Host:
    """One of them."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.name = f"n{number}"
        self.address = f"{cluster.network}.{number + 1}"
        self.link = f"{cluster.prefix}{number}"
        self.space = f"{cluster.prefix}-{number}"
        self._cluster = cluster
        folder = cluster.folder
        run("ip", "netns", "add", self.space)
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0",
            "netns", self.space)  # fmt: skip
        run("ip", "link", "set", self.link, "master", cluster.bridge, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("link", "set", "eth0", "up"),
            ("address", "add", f"{self.address}/24", "dev", "eth0"),
        ):
            run("ip", "-n", self.space, *words)
        key = folder / f"host-{self.name}"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        settings = folder / f"sshd-{self.name}"
        settings.write_text(
            f"HostKey {key}\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\nStrictModes no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nUseDNS no\n"
            "MaxStartups 100\nMaxSessions 100\nPrintMotd no\n"
        )
        command = (
            "setpriv", "--pdeathsig", "KILL",  # tests that are killed leave no sshd
            "ip", "netns", "exec", self.space,
            "unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc",
            "sh", "-c", f"hostname {self.name}; exec {shutil.which('sshd')} -D -e -f {settings}",
        )  # fmt: skip
        self._outer = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"sshd-{self.name}.log").open("wb"),
            start_new_session=True,
        )
        self.pid = self._first_process()

    def enter(self, *argv: object) -> list[str]:
        """Return the command line that runs a command on this host."""
        return ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", *map(str, argv)]

    def run(self, *argv: object) -> str:
        return run(*self.enter(*argv))

    def start(self, *argv: object) -> subprocess.Popen[bytes]:
        """Start a command on this host; it ends when its `nsenter` is killed."""
        return subprocess.Popen(
            [*self.enter(), "setpriv", "--pdeathsig", "KILL", *map(str, argv)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def set_link(self, state: str) -> None:
        """`up`, or `down`: the cable is cut."""
        run("ip", "link", "set", self.link, state)

    def processes(self) -> dict[int, str]:
        """Command lines by pid, seen from here, of what runs on the host, without its sshd's."""
        found = {}
        space = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    if (process / "ns/pid").readlink() != space:
                        continue
                    line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if line and not line.startswith("sshd: ") and int(process.name) != self.pid:
                    found[int(process.name)] = line
        return found

    def close(self) -> None:
        for pid in (self.pid, self._outer.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._outer.wait()
        subprocess.run(["ip", "link", "del", self.link], capture_output=True)
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True)

    def _first_process(self) -> int:
        """Find the pid of sshd below ip and unshare: ip execs unshare, which forks sshd."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
            for pid in children.read_text().split():
                if b"sshd" in Path("/proc", pid, "cmdline").read_bytes().split(b"\0")[0]:
                    return int(pid)
            time.sleep(0.02)
        raise AssertionError((self._cluster.folder / f"sshd-{self.name}.log").read_text())


class Cluster:
    """Hosts n0 (where the launcher runs), n1, n2 ... on one bridge."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Of this process, so that two test runs on one machine do not meet.
        self.prefix = f"tc{os.getpid():x}v"
        self.bridge = f"{self.prefix}br"
        self.network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 256}"
        self.hosts: list[Host] = []
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks itself in
        remove_stale()
        try:
            run("ip", "link", "add", self.bridge, "type", "bridge")
            run("ip", "link", "set", self.bridge, "up")
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "user")
            for number in range(nodes + 1):
                self.hosts.append(Host(self, number))
            self.write_known_hosts()
            self._write_settings()
            self._await_ssh()
        except BaseException:
            self.close()
            raise

    @property
    def settings(self) -> Path:
        """Path for `launcher.ssh_config`."""
        return self.folder / "ssh_config"

    @property
    def nodes(self) -> list[Host]:
        return self.hosts[1:]

    def write_known_hosts(self, **keys_of: str) -> None:
        """Write known_hosts; `keys_of` maps a host's name to the host whose key is wrongly listed
        for it.
        """
        lines = []
        for host in self.hosts:
            key = (self.folder / f"host-{keys_of.get(host.name, host.name)}.pub").read_text()
            lines.append(f"{host.address} {key}")
        (self.folder / "known_hosts").write_text("".join(lines))

    def start(self, *argv: object, cwd: Path, **variables: str) -> subprocess.Popen[str]:
        """Start a command on the launcher's host. The returned pid is `nsenter`'s, see `inner`."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(self.folder), **variables}
        return subprocess.Popen(
            # nsenter leaves the folder.
            self.hosts[0].enter("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def trainctl(self, *arguments: object, cwd: Path, code: int = 0, **variables: str) -> str:
        """`trainctl ARGUMENTS` on the launcher's host, to its end; what it printed."""
        process = self.start(sys.executable, "-m", "trainctl", *arguments, cwd=cwd, **variables)
        out, err = process.communicate(timeout=240)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in out + err
        return out + err

    def left(self) -> dict[str, dict[int, str]]:
        """Return the processes that a launch left on each host, by pid, without sshd."""
        return {host.name: found for host in self.hosts if (found := host.processes())}

    def assert_clean(self, seconds: float = 10.0) -> float:
        """Wait until nothing is left on any host; how long that took."""
        start = time.monotonic()
        while left := self.left():
            assert time.monotonic() - start < seconds, left
            time.sleep(0.05)
        return time.monotonic() - start

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
        for number in range(8):  # of one whose making failed half way
            subprocess.run(["ip", "netns", "del", f"{self.prefix}-{number}"], capture_output=True)

    def _write_settings(self) -> None:
        lines: list[str] = []
        for number, host in enumerate([*self.hosts, None]):
            name = host.name if host else "nowhere"
            address = host.address if host else f"{self.network}.{number + 1}"
            lines += [f"Host {name}", f"  HostName {address}"]
        lines += [
            "Host *",
            "  User root",
            f"  IdentityFile {self.folder}/user",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.folder}/known_hosts",
            "  GlobalKnownHostsFile none",
            "  StrictHostKeyChecking yes",
        ]
        self.settings.write_text("\n".join(lines) + "\n")

    def _await_ssh(self) -> None:
        deadline = time.monotonic() + 20
        for host in self.nodes:
            while True:
                done = subprocess.run(
                    self.hosts[0].enter("ssh", "-F", self.settings, host.name, "true"),
                    capture_output=True,
                    text=True,
                )
                if done.returncode == 0:
                    break
                assert time.monotonic() < deadline, done.stderr
                time.sleep(0.1)


def remove_stale() -> None:
    """Remove namespaces and bridges of test runs that were killed: their processes are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        found = re.match(r"(tc([0-9a-f]+)v)-\d+", line)
        if found and not Path("/proc", str(int(found[2], 16))).exists():
            subprocess.run(["ip", "netns", "del", found[0]], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{found[1]}br"], capture_output=True)


def inner(process: subprocess.Popen[str], seconds: float = 10.0) -> int:
    """Return the pid, in this namespace, of the command that `Cluster.start` runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.02)
    raise AssertionError("nsenter has started nothing")


def wait(
    process: subprocess.Popen[str], condition: Callable[[], Any], seconds: float = 120.0
) -> None:
    """Wait for something to come true while a process lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
