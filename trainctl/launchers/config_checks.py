"""Configurations that a launcher refuses by itself: found by `validate`, before any launch.

Values that get into a scheduler's files or command lines must be single plain words. This module
imports nothing that starts processes, and a launcher's settings only where they are checked.

A chat template is checked for the fields that conversations have. No torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from trainctl.config.hosts import HOST_NAME_HINT, chosen_hosts, is_host_name
from trainctl.config.literal_secrets import referenced_variables
from trainctl.config.registry import function_of, load_spec
from trainctl.config.schema import OnBadText, RunConfig
from trainctl.config.secrets import names_in
from trainctl.data.template_rendering import CALLS, REASONING, has_fields
from trainctl.errors import ExitCode, Finding, Severity, TrainctlError
from trainctl.hardware import Hardware
from trainctl.options.data._records import TemplateConfig
from trainctl.options.launcher import section_of, spec_of
from trainctl.plans.mixture import keyed_sources
from trainctl.readers.conversations import ANSWERS, Message
from trainctl.readers.documents import Reader
from trainctl.readers.files import split_files

UNREACHED_NODES = "TC077"
UNSAFE_WORD, UNSAFE_PATH, UNSET = "TC160", "TC161", "TC168"

_WORD = re.compile(r"[A-Za-z0-9_.,:;+@%/=&|*()\[\]?!~^-]+")
"""Pattern of names of partitions, accounts, features, dependencies, resources, images: no space, no
quote, no `$`, no backquote and no control character, so that every reader sees a single word.
"""

WRONG_HOSTS = "TC169"
NO_IMAGE, BAD_NAME = "TC164", "TC166"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
FEW_HOSTS = "TC163"
NO_JOB_SERVER, TAKEN_RESOURCE = "TC510", "TC512"
_OWN_OPTIONS = ("array", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output")
"""Options of sbatch that the agents and the logs of a run depend on."""
_LEAST_AMOUNT = 0.0001
"""Smallest amount of a resource that Ray reserves."""
_JOB_SERVER = re.compile(r"(https?|ray)://[A-Za-z0-9_.:\[\]-]+(/[A-Za-z0-9_./-]*)?|auto")


def launcher_refusals(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return what keeps the configuration's launcher from starting it, on whichever machine."""
    spec = spec_of(config.launcher)
    found = list(_unreached_nodes(config, hardware))
    if spec.check_config:
        found += function_of("launcher", spec.name, "check_config")(config, hardware)
    if spec.resolves_here:
        found += _unset_variables(config)
    return found


def _unreached_nodes(config: RunConfig, hardware: Hardware) -> Iterator[Finding]:
    """Check that the launcher starts as many nodes as the plan has.

    Commands that only plan skip this: how a cluster is reached does not change a plan.
    """
    spec, nodes = spec_of(config.launcher), hardware.nodes
    if not spec.several_nodes and nodes > 1:
        yield Finding(
            rule=UNREACHED_NODES,
            key="launcher.kind",
            message=f"launcher.kind={spec.name} starts one node, and the plan is for {nodes}",
            hint="launcher=slurm or launcher=ssh, or hardware of one node",
        )
    if spec.reach is not None:
        for problem in spec.reach(config.launcher, nodes):
            yield Finding(rule=UNREACHED_NODES, **problem._asdict())


def _unset_variables(config: RunConfig) -> Iterator[Finding]:
    for name in referenced_variables(config):
        if name not in os.environ:
            yield Finding(
                rule=UNSET,
                key=_referring_key(config, name),
                message=f"${{oc.env:{name}}} cannot be resolved: {name} is not set here",
                hint=f"export {name}",
                exit_code=ExitCode.environment,
            )


def _referring_key(config: RunConfig, name: str) -> str:
    for variable, value in config.launcher.environment.items():
        if f"oc.env:{name}" in value.replace(" ", ""):
            return f"launcher.environment.{variable}"
    if any(name in names_in(url) for url in config.logging.alerts.urls):
        return "logging.alerts.urls"
    return "script_arguments"


def check_words(values: Iterable[tuple[str, str | None]]) -> Iterator[Finding]:
    """Yield a finding for each value that is not a single word, or starts like an option.

    Args:
        values: Config keys and their values; None is skipped.
    """
    for key, value in values:
        if value is None:
            continue
        if not _WORD.fullmatch(value) or value.startswith("-"):
            yield Finding(
                rule=UNSAFE_WORD,
                key=key,
                message=f"{key}={value!r} is not a plain word",
                hint="letters, digits and _.,:;+@%/=&|*()[]?!~^- without spaces, and no - in front",
            )


def check_programs(values: Iterable[tuple[str, str | None]]) -> Iterator[Finding]:
    """Yield a finding for each program that is empty or would be read as an option.

    Args:
        values: Config keys and their values, names or paths; None is skipped.
    """
    for key, value in values:
        if value is not None and (value.startswith("-") or not value.strip()):
            yield Finding(
                rule=UNSAFE_WORD,
                key=key,
                message=f"{key}={value!r} is no name and no path of a program",
                hint="an absolute path, or a name in PATH, without - in front",
            )


def check_options(key: str, options: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each option that is not `--name` or `--name=VALUE` of plain words."""
    for option in options:
        name, equals, value = option.partition("=")
        is_name = re.fullmatch(r"--[a-z][a-z0-9-]*", name) is not None
        if not is_name or (equals and not _WORD.fullmatch(value)):
            yield Finding(
                rule=UNSAFE_WORD,
                key=key,
                message=f"{option!r} in {key} is no option of the form --name=VALUE",
                hint=f"{key}=['--name=VALUE']",
            )


def check_path(path: Path) -> Iterator[Finding]:
    """Yield a finding for a path with control characters, which a script's line cannot hold."""
    if any(ord(character) < 32 or ord(character) == 127 for character in str(path)):
        yield Finding(
            rule=UNSAFE_PATH,
            message=f"the run directory's path has control characters: {str(path)!r}",
            hint="name another directory with --run-dir",
        )


def check_ssh(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return problems with the names of the hosts, and with the hostfile."""
    from trainctl.options.launcher.ssh import SshConfig

    launcher = section_of(config, SshConfig)
    findings = [*check_programs([("launcher.python", launcher.python)])]
    findings += [
        Finding(
            rule=WRONG_HOSTS,
            key="launcher.hosts",
            message=f"{name} is there twice: each node is another host",
            hint="name each host once; hardware.devices_per_node says how many devices it has",
        )
        for name in sorted({name for name in launcher.hosts if launcher.hosts.count(name) > 1})
    ]
    if (
        launcher.hostfile is not None
        or launcher.include is not None
        or launcher.exclude is not None
    ):
        try:
            chosen_hosts(launcher, hardware.nodes, hardware.devices_per_node)
        except TrainctlError as error:
            key = "launcher.hosts" if launcher.hostfile is None else "launcher.hostfile"
            findings.append(
                Finding(rule=WRONG_HOSTS, key=key, message=error.message, hint=error.hint)
            )
    return findings


def check_slurm(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return a finding for each value that a job script cannot hold, or that sbatch refuses."""
    from trainctl.options.launcher.slurm import SlurmConfig, is_one_of

    launcher, key = section_of(config, SlurmConfig), "launcher.slurm_options"
    words = {
        "slurm_partition": launcher.slurm_partition,
        "slurm_account": launcher.slurm_account,
        "slurm_qos": launcher.slurm_qos,
        "slurm_constraint": launcher.slurm_constraint,
        "slurm_gres": launcher.slurm_gres,
        "slurm_dependency": launcher.slurm_dependency,
        "slurm_container": launcher.slurm_container,
    }
    lists = [("slurm_modules", word) for word in launcher.slurm_modules]
    lists += [("slurm_container_mounts", word) for word in launcher.slurm_container_mounts]
    named = [(f"launcher.{name}", value) for name, value in (*words.items(), *lists)]
    taken = [
        Finding(
            rule=TAKEN_RESOURCE,
            key=key,
            message=f"{each!r} in {key} is set by trainctl",
            hint="leave it out; hardware.nodes is the number of nodes",
        )
        for each in launcher.slurm_options
        if is_one_of(each, _OWN_OPTIONS)
    ]
    return [*check_words(named), *check_options(key, launcher.slurm_options), *taken]


def check_kubernetes(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return problems with the image, the names and the secret; not with where the run is."""
    from trainctl.options.launcher.kubernetes import KubernetesConfig

    launcher = section_of(config, KubernetesConfig)
    findings = []
    if launcher.kubernetes_image is None:
        findings.append(
            Finding(
                rule=NO_IMAGE,
                key="launcher.kubernetes_image",
                message="launcher=kubernetes needs an image that has trainctl",
                hint="launcher.kubernetes_image=REGISTRY/NAME:TAG",
            )
        )
    names = {
        "kubernetes_namespace": launcher.kubernetes_namespace,
        "kubernetes_queue": launcher.kubernetes_queue,
        "kubernetes_secret": launcher.kubernetes_secret,
        "kubernetes_service_account": launcher.kubernetes_service_account,
    }
    labels = [*names.items(), *(("kubernetes_claims", name) for name in launcher.kubernetes_claims)]
    for key, value in labels:
        if value is not None and not _LABEL.fullmatch(value):
            findings.append(
                Finding(
                    rule=BAD_NAME,
                    key=f"launcher.{key}",
                    message=f"launcher.{key}: {value!r} is no name of Kubernetes",
                    hint="lower-case letters, digits, - and .",
                )
            )
    findings += check_words([("launcher.kubernetes_image", launcher.kubernetes_image)])
    findings += check_programs([("launcher.kubernetes_python", launcher.kubernetes_python)])
    if launcher.kubernetes_secret is None:
        findings += [
            Finding(
                rule=UNSET,
                key="launcher.kubernetes_secret",
                message=f"nothing gives the pods {name}, which ${{oc.env:{name}}} stands for",
                hint=f"kubectl create secret generic NAME --from-literal={name}=..., and "
                "launcher.kubernetes_secret=NAME",
            )
            for name in referenced_variables(config)
        ]
    return findings


def check_ray(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return problems with the address, the interpreter and the names of resources."""
    from trainctl.options.launcher.ray import RayConfig

    launcher = section_of(config, RayConfig)
    findings = [*check_programs([("launcher.python", launcher.python)])]
    if launcher.address is not None and not _JOB_SERVER.fullmatch(launcher.address):
        findings.append(
            Finding(
                rule=NO_JOB_SERVER,
                key="launcher.address",
                message=f"{launcher.address!r} is no URL of Ray's job server",
                hint="launcher.address=http://HEAD:8265, the address of Ray's dashboard",
            )
        )
    taken = {"CPU": "launcher.cpus_per_node", "GPU": "hardware.devices_per_node"}
    for name, amount in launcher.resources.items():
        if name in taken:
            message = f"launcher.resources has {name}, which another key reserves"
            hint = f"{taken[name]}={amount:g}"
        elif name in ("memory", "object_store_memory", "bundle"):
            message = f"launcher.resources has {name}, which is no custom resource of Ray"
            hint = "launcher.resources={NAME: 1}, a NAME of `ray start --resources`"
        elif not _LEAST_AMOUNT <= amount < math.inf:
            message = f"launcher.resources has {amount:g} of {name}, which Ray cannot reserve"
            hint = f"launcher.resources={{{name}: 1}}"
        else:
            continue
        findings.append(
            Finding(rule=TAKEN_RESOURCE, key="launcher.resources", message=message, hint=hint)
        )
    return findings


def check_mpi(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return problems with the program's name, and with the number and names of hosts."""
    from trainctl.options.launcher.mpi import MpiConfig

    launcher, nodes = section_of(config, MpiConfig), hardware.nodes
    findings = [*check_programs([("launcher.mpi_program", launcher.mpi_program)])]
    if launcher.mpi_hostfile is not None:
        path = Path(launcher.mpi_hostfile)
        if not path.is_file():
            message = f"there is no file {path}"
            missing = Finding(rule=FEW_HOSTS, key="launcher.mpi_hostfile", message=message)
            return [*findings, missing]
        names = _hosts_with_users(path.read_text(encoding="utf-8", errors="replace"))
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
    return [name.rpartition("@")[2] for name in _hosts_with_users(text)]


def _hosts_with_users(text: str) -> list[str]:
    """Return the hosts of a hostfile, each with its `USER@` if the file has one."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    names = [words[0] for words in lines if words]
    return [name.partition(":")[0] if name.count(":") == 1 else name for name in names]


CALLS_LEFT_OUT, FIELD_LEFT_OUT = "TC550", "TC551"

_READ = 1000
"""Records read of each source: more would delay a launch."""

_RENDERED = 100
"""Conversations rendered of those, as a text takes up to ten milliseconds."""


def check_templates(config: RunConfig) -> list[Finding]:
    """Return a finding for each kind of field that a template leaves out of the first records.

    Files that cannot be read, and a missing template, are reported by other checks.
    """
    findings: list[Finding] = []
    if config.trains_itself and config.data.factory is None:
        for key, section in keyed_sources(config.data).items():
            if isinstance(section, TemplateConfig):
                with suppress(TrainctlError, OSError):
                    findings += _check_source(key, section, config)
    return findings


def _check_source(key: str, section: TemplateConfig, config: RunConfig) -> Iterator[Finding]:
    read, counts = _count_left_out(section, config)
    for kind, count in counts.items():
        is_error = kind == CALLS and section.on_bad_text is not OnBadText.skip
        hint = f"{key}.chat_template=FILE.jinja, with a template that writes them"
        yield Finding(
            rule=CALLS_LEFT_OUT if kind == CALLS else FIELD_LEFT_OUT,
            key=f"{key}.chat_template",
            message=f"{count:,} of the first {read:,} records have {kind} that the chat template "
            + ("leaves out" if is_error or kind != CALLS else "leaves out, and are skipped"),
            hint=hint if kind != REASONING else f"{hint}; without one it is not learnt",
            severity=Severity.error if is_error else Severity.warning,
        )


def _count_left_out(section: TemplateConfig, config: RunConfig) -> tuple[int, Counter[str]]:
    """Return the number of records read, and how many lose a field, by its kind."""
    from trainctl.data.chat_template import ChatTemplate  # imports numpy, which few plans need

    file = load_spec("tokenizer", config.tokenizer.kind).file
    template: ChatTemplate | None = None
    counts: Counter[str] = Counter()
    read = rendered = 0
    for document in islice(Reader(section).documents(split_files(section).train), _READ):
        read += 1
        kinds: set[str] = set()
        for messages, tools in _conversations(json.loads(document.text)):
            if has_fields(messages, tools):
                rendered += 1
                template = template or ChatTemplate.of(
                    file(config.tokenizer), section.chat_template, section.template_arguments
                )
                kinds |= template.left_out(messages, tools)
        counts.update(kinds)
        if rendered >= _RENDERED:
            break
    return read, counts


def _conversations(record: Mapping[str, Any]) -> Iterator[tuple[list[Message], list[Any]]]:
    """Yield the conversations of a record, with the schemas of its tools."""
    tools = record.get("tools") or []
    before = record.get("messages") or record.get("prompt")
    if isinstance(before, list):
        answers = [record[key] for key in (*ANSWERS, "completion") if key in record]
        for answer in answers or [[]]:
            yield [*before, *answer], tools
