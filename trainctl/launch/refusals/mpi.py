"""Configurations that the MPI launcher refuses."""

from __future__ import annotations

from pathlib import Path

from trainctl.config.hosts import HOST_NAME_HINT, is_host_name
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.launch.quoting import UNSAFE_WORD, check_programs
from trainctl.options.launcher import section_of
from trainctl.options.launcher.mpi import MpiConfig

FEW_HOSTS = "TC163"


def check_config(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return problems with the program's name, and with the number and names of hosts."""
    launcher, nodes = section_of(config, MpiConfig), hardware.nodes
    findings = [*check_programs([("launcher.mpi_program", launcher.mpi_program)])]
    if launcher.mpi_hostfile is not None:
        path = Path(launcher.mpi_hostfile)
        if not path.is_file():
            message = f"there is no file {path}"
            missing = Finding(rule=FEW_HOSTS, key="launcher.mpi_hostfile", message=message)
            return [*findings, missing]
        names = _named(path.read_text(encoding="utf-8", errors="replace"))
        findings += [
            Finding(
                rule=UNSAFE_WORD,
                key="launcher.mpi_hostfile",
                message=f"{path}: {name!r} is not a host name",
                hint=HOST_NAME_HINT,
            )
            for name in names
            if not is_host_name(name.strip("[]"))
        ]
        if len(names) < nodes:
            findings.append(
                Finding(
                    rule=FEW_HOSTS,
                    key="launcher.mpi_hostfile",
                    message=f"{path} names {len(names)} hosts, and the plan is for {nodes}",
                    hint=f"name {nodes} hosts, or hardware.nodes={len(names)}",
                )
            )
    return findings


def hosts_in(text: str) -> list[str]:
    """Return the hosts of a hostfile: `HOST slots=N` of Open MPI, `HOST:N` of MPICH."""
    return [name.rpartition("@")[2] for name in _named(text)]


def _named(text: str) -> list[str]:
    """Return the hosts of a hostfile, each with its `USER@` if the file has one."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    names = [words[0] for words in lines if words]
    return [name.partition(":")[0] if name.count(":") == 1 else name for name in names]
