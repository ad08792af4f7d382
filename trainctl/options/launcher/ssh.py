"""Several machines over ssh: an agent on each host, started and supervised from this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainctl.config.hosts import HOST_NAME_HINT, is_host_name, is_interface_name
from trainctl.config.schema.option import option
from trainctl.options.launcher import KeyProblem, Launcher
from trainctl.options.launcher._elastic import ElasticConfig, check_min_nodes


@dataclass
class SshConfig(ElasticConfig):
    """Keys of ssh."""

    hosts: list[str] = option([], "Host names to connect to, for ssh.")
    hostfile: str | None = option(None, "Hostfile of `host slots=n` lines, for ssh.", local=True)
    include: str | None = option(
        None, "Hosts, and devices on each, to use, as in `node1@node2:0,2`; for ssh."
    )
    exclude: str | None = option(
        None, "Hosts, or devices on them, to exclude, as in `node1@node2:0,2`; for ssh."
    )
    interface: str | None = option(
        None, "Network interface on every host; none uses the one that reaches the other hosts."
    )
    interfaces: dict[str, str] = option(
        {}, "Network interfaces of hosts that differ from `interface`, by host name."
    )
    python: str | None = option(
        None,
        "Python interpreter on every host, for ssh; none is the path of this process's "
        "interpreter.",
        local=True,
        runs_code=True,
    )
    ssh_config: str | None = option(
        None,
        "ssh configuration file (`ssh -F`) with ports, users and keys; none is the user's own.",
        local=True,
        runs_code=True,
    )
    preflight_seconds: float = option(
        60.0,
        "Time within which all hosts must answer before the start, for ssh.",
        unit="seconds",
        above=0,
    )
    node_timeout_seconds: float = option(
        60.0,
        "Time without contact after which a node counts as lost; a node that loses contact with "
        "its launcher stops.",
        unit="seconds",
        minimum=3,
    )


def _check_host_keys(section: SshConfig, nodes: int) -> Iterator[KeyProblem]:
    """Yield a problem unless exactly one key names the hosts, and enough of them."""
    is_chosen = section.include is not None or section.exclude is not None
    if section.hosts and section.hostfile is not None:
        yield KeyProblem(
            "launcher.hosts",
            "launcher.hosts and launcher.hostfile are both set",
            "leave one of them out",
        )
    elif not section.hosts and section.hostfile is None:
        yield KeyProblem(
            "launcher.hosts",
            f"launcher.kind=ssh needs the host name of each node (nodes: {nodes})",
            "launcher.hosts=[node1,node2], or launcher.hostfile=/path/to/hostfile",
        )
    elif section.hosts and not is_chosen and len(section.hosts) != nodes:
        yield KeyProblem(
            "launcher.hosts",
            f"launcher.hosts names {len(section.hosts)} hosts, and the plan is for {nodes}",
            f"name {nodes} hosts, or hardware.nodes={len(section.hosts)}",
        )
    yield from check_min_nodes(section, nodes)


def _check_host_names(section: SshConfig) -> Iterator[KeyProblem]:
    """Yield each name that is not a valid host or interface, since ssh or a shell could misread
    it.
    """
    named = [("launcher.hosts", name) for name in section.hosts]
    named += [("launcher.interfaces", name) for name in section.interfaces]
    for key, name in named:
        if not is_host_name(name):
            yield KeyProblem(key, f"{name!r} is not a host name", HOST_NAME_HINT)
    interfaces = [("launcher.interface", section.interface)] if section.interface else []
    interfaces += [("launcher.interfaces", name) for name in section.interfaces.values()]
    for key, name in interfaces:
        if not is_interface_name(name):
            yield KeyProblem(key, f"{name!r} is not the name of a network interface", "as in eth0")


SPEC = Launcher(
    name="ssh",
    keys=SshConfig,
    build="trainctl.launchers.ssh:run_launch",
    render="trainctl.launchers.ssh:render",
    check="trainctl.launchers.ssh:check",
    check_config="trainctl.launchers.config_checks:check_ssh",
    asks_hosts=True,
    reach=_check_host_keys,
    bad_names=_check_host_names,
)
