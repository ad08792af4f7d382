"""Probes of all hosts at once: their facts, and whether they reach each other."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from trainctl.config.codec import to_plain
from trainctl.config.hosts import Host
from trainctl.config.registry import trusted_folder_variable
from trainctl.config.secrets import resolve_variables
from trainctl.launchers.processes import allow_many_files, ssh_command
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.provenance import select_variables

_MARK = ".trainctl-seen-"
_END_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Result of probing one host."""

    host: Host
    facts: dict[str, Any] | None = None
    """Answer to the first question (`trainctl.launchers.probe`); None if any answer is missing."""
    clock_seconds: float = 0.0
    """Least offset of its clock from this machine's; positive is ahead."""
    unreached: tuple[str, ...] = ()
    """Hosts that it cannot connect to, each with the reason."""
    unseen: tuple[str, ...] = ()
    """Names of the machines whose files it does not see."""
    return_code: int | None = None
    """Exit code of ssh, where there was no answer; None if it was still waiting."""
    stderr: str = ""
    """Output of ssh, or of the host, on stderr."""


def probe_hosts(
    hosts: Sequence[Host], plan: RunPlan, folder: Path, files: Sequence[str] = ()
) -> tuple[HostReport, ...]:
    """Probe every host, in parallel, within `launcher.preflight_seconds`.

    Args:
        hosts: Hosts to probe; the first one has the rendezvous.
        folder: Folder on the storage that the hosts share with each other and with this machine.
    """
    allow_many_files()
    launcher = section_of(plan.config, SshConfig)
    deadline = time.monotonic() + launcher.preflight_seconds
    token = secrets.token_hex(4)
    marks = [f"{_MARK}{token}-{node}" for node in range(len(hosts))]
    own = folder / f"{_MARK}{token}-launcher"
    own.write_text("")
    try:
        with _Probes(hosts, launcher) as probes:
            facts = probes.ask(_fact_questions(hosts, plan, folder, marks, files), deadline)
            asked = [node for node in sorted(facts) if _can_be_asked(facts[node])]
            seen = {marks[node]: hosts[node].name for node in asked} | {own.name: "this machine"}
            addresses = [[facts[node]["address"], facts[node]["listens"]] for node in asked]
            peers = {"peers": {"addresses": addresses, "marks": list(seen)}}
            found = probes.ask(dict.fromkeys(asked, peers), deadline)
            return tuple(
                HostReport(
                    host=host,
                    facts=facts[node] if node in found or node not in asked else None,
                    clock_seconds=facts[node]["skew"],
                    unreached=tuple(
                        f"{hosts[other].name} ({facts[other]['address']}): {failure}"
                        for other, failure in zip(asked, found[node]["failures"], strict=True)
                        if failure
                    )
                    if node in found
                    else (),
                    unseen=tuple(seen[mark] for mark in found[node]["unseen"])
                    if node in found
                    else (),
                )
                if node in facts
                else HostReport(
                    host=host, return_code=probes.return_code(node), stderr=probes.stderr(node)
                )
                for node, host in enumerate(hosts)
            )
    finally:
        own.unlink(missing_ok=True)


def _fact_questions(
    hosts: Sequence[Host], plan: RunPlan, folder: Path, marks: Sequence[str], files: Sequence[str]
) -> dict[int, dict[str, Any]]:
    launcher = section_of(plan.config, SshConfig)
    environment = trusted_folder_variable() | select_variables(
        os.environ, launcher.forward_environment
    )
    environment |= resolve_variables(launcher.environment, os.environ)
    return {
        node: {
            "facts": {
                "interface": launcher.interfaces.get(host.name, launcher.interface),
                "port": (launcher.port or 0) if node == 0 else None,
                "folder": str(folder),
                "mark": marks[node],
                "files": list(files),
                "config": to_plain(plan.config),
                "hardware": to_plain(plan.hardware),
                "environment": environment,
            }
        }
        for node, host in enumerate(hosts)
    }


def _can_be_asked(facts: dict[str, Any]) -> bool:
    """Return True if a host has what the second question needs: an address, a listener, storage."""
    return bool(facts["address"] and facts["listens"] and not facts["storage"]["problem"])


class _Probes:
    """One probe process per host; all have ended when the context is left."""

    def __init__(self, hosts: Sequence[Host], launcher: SshConfig) -> None:
        self._silent: set[int] = set()
        self._errors: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for host in hosts:
            errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
            self._errors.append(errors)
            self._processes.append(
                subprocess.Popen(
                    ssh_command(host, launcher, "trainctl.launchers.probe"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    bufsize=0,
                    start_new_session=True,
                )
            )

    def ask(
        self, questions: dict[int, dict[str, Any]], deadline: float
    ) -> dict[int, dict[str, Any]]:
        """Return the answers that came in time, by number of the host.

        Adds `skew` to each: the least offset of the host's clock from this machine's, in seconds.
        """
        answers: dict[int, dict[str, Any]] = {}
        lines: dict[int, bytes] = {}
        asked = time.time()
        with selectors.DefaultSelector() as waiting:
            for node, question in questions.items():
                process = self._processes[node]
                assert process.stdin is not None and process.stdout is not None
                with suppress(OSError):  # it has ended: no answer will come
                    process.stdin.write(json.dumps(question).encode() + b"\n")
                lines[node] = b""
                waiting.register(process.stdout, selectors.EVENT_READ, node)
            while waiting.get_map():
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._silent |= {key.data for key in waiting.get_map().values()}
                    break
                for key, _ in ready:
                    node, stream = key.data, self._processes[key.data].stdout
                    assert stream is not None
                    data = stream.read(65536)
                    *whole, lines[node] = (lines[node] + (data or b"")).split(b"\n")
                    answer = next(filter(None, map(_parse_answer, whole)), None)
                    if answer is not None:
                        answers[node] = {
                            **answer,
                            "skew": _clock_offset(answer, asked, time.time()),
                        }
                    if answer is not None or not data:
                        waiting.unregister(key.fileobj)
        return answers

    def return_code(self, node: int) -> int | None:
        """Return the exit code of the host's ssh; None if it still runs."""
        if node in self._silent:
            return self._processes[node].poll()
        with suppress(subprocess.TimeoutExpired):  # it has closed its stdout: it is about to end
            return self._processes[node].wait(_END_SECONDS)
        return None

    def stderr(self, node: int) -> str:
        self._errors[node].seek(0)
        return self._errors[node].read().decode(errors="replace").strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + _END_SECONDS
        for process, errors in zip(self._processes, self._errors, strict=True):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
            errors.close()


def _parse_answer(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if the probe did not write it: a login script may print a greeting."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _clock_offset(line: dict[str, Any], asked: float, answered: float) -> float:
    """Return the least clock offset in seconds, if the clock was read between the two times."""
    there = float(line.get("time", asked))
    return max(0.0, there - answered) + min(0.0, there - asked)
