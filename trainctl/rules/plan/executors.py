"""Rules about the executor that prepares a corpus."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainctl.config.schema import DataExecutor
from trainctl.config.suggest import words
from trainctl.options.data import spec_of
from trainctl.options.launcher.slurm import is_one_of
from trainctl.plans.mixture import sources_of
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem, rule

_OWN_OPTIONS = words("array clusters job-name nodes ntasks open-mode output parsable wait wrap")
"""Options of sbatch by which an array job's results are found."""


@rule(
    "TC500",
    "data.executor_address",
    example="recipe=tiny data.executor=ray data.executor_address=head",
)
def ray_cluster_has_an_address(draft: Draft) -> Iterator[Problem]:
    """data.executor_address is an address that Ray can connect to.

    auto is the cluster that this machine is a node of, HOST:PORT the head node of one that this
    machine joins as a driver, and ray://HOST:PORT the server for clients outside the cluster.

    Fix: Use the address that ray start has printed, usually HOST:6379 or ray://HOST:10001.
    """
    address = draft.config.data.executor_address
    found = re.fullmatch(r"(ray://)?[^\s/:]+:(\d{1,5})", address)
    if address != "auto" and not (found and 0 < int(found[2]) < 1 << 16):
        host = re.sub(r"^.*//|[:/].*$", "", address) or "HOST"
        yield Problem(
            f"data.executor_address={address} is no address of a Ray cluster",
            f"nearest legal: auto, {host}:6379 or ray://{host}:10001",
        )


@rule(
    "TC501",
    "data.executor_options",
    example="recipe=tiny data.executor=slurm 'data.executor_options=[-p cpu]'",
)
def array_jobs_have_legal_options(draft: Draft) -> Iterator[Problem]:
    """data.executor_options are long options of sbatch, and none that the array job needs.

    Each entry is one option as --name or --name=VALUE. The job's name, number of tasks, nodes and
    output are set by trainctl, which finds the job and the results by them.

    Fix: Write --partition=cpu for -p cpu; set the number of tasks with --workers.
    """
    for option in draft.config.data.executor_options:
        found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[^\x00-\x1f]+)?", option)
        if found is None:
            yield Problem(
                f"{option!r} in data.executor_options is no option of the form --name=VALUE",
                "data.executor_options=['--partition=cpu']",
            )
        elif is_one_of(option, _OWN_OPTIONS):
            yield Problem(
                f"{option!r} in data.executor_options is set by trainctl",
                "leave it out; data prepare --workers N makes an array of N tasks",
            )


@rule("TC502", "data.executor", example="recipe=tiny data.executor=ray data.factory=mine:texts")
def executor_has_tasks(draft: Draft) -> Iterator[Problem]:
    """data.executor has text to prepare in tasks.

    A function's texts, and text that data.max_bytes cuts, are read by one process. Token files and
    prepared corpora need no preparation.

    Fix: Set data.executor=local.
    """
    data = draft.config.data
    if data.executor is DataExecutor.local:
        return
    sections = sources_of(data).values()
    why, hint = "", "data.executor=local"
    if data.factory is not None:
        why = "data.factory gives its texts in one process"
    elif all(spec_of(each).is_tokenized or spec_of(each).is_prepared for each in sections):
        why = "the tokens are there"
    elif all(each.max_bytes is not None for each in sections):
        why = "text that data.max_bytes cuts is read by one process"
        hint += ", or leave data.max_bytes out"
    if why:
        yield Problem(f"data.executor={data.executor.value} has nothing to do: {why}", hint)
