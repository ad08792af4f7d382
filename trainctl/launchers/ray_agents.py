"""Nodes and agents of a run on Ray, as the launcher in the job sees them.

An agent is the child of a Ray actor and dies with it, so Ray's own view of its nodes decides which
are lost, and its end of a job ends the agents.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, MachineError
from trainctl.launchers.agent.rendezvous import RENDEZVOUS_VARIABLE
from trainctl.launchers.attempts import PreparedAttempt
from trainctl.launchers.interface import LaunchRequest
from trainctl.launchers.node_agents import LOST, Availability, NodeAgents, record_waiting, why_not
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ray import RayConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.failures import Cause
from trainctl.runs.files import open_as_its_folder
from trainctl.runs.processes import PARENT_VARIABLE, wait_while
from trainctl.runs.status import Request, file_request, is_requested

_PLACING_SECONDS = 2.0
"""Time for Ray to place a group for which there is room."""
_ANSWER_SECONDS = 600.0
"""Longest start of an actor: its interpreter may be on a slow network file system."""
_DEATH_SECONDS = 30.0
"""Time in which Ray notices that a node is gone: five health checks, 3 s apart, of 10 s at most."""


class RayPool:
    """Placement group of a launch: a bundle for each node, each on a node of its own.

    It is kept from attempt to attempt. Ray places the bundles of a lost node again as soon as there
    is room, and an autoscaler sees what is missing.
    """

    def __init__(self, launch: LaunchRequest) -> None:
        hardware = launch.plan.hardware
        self.launcher = section_of(launch.plan.config, RayConfig)
        devices = 0 if hardware.accelerator is Accelerator.cpu else hardware.devices_per_node
        self.bundle: dict[str, float] = {
            "CPU": self.launcher.cpus_per_node or hardware.devices_per_node,
            **({"GPU": devices} if devices else {}),
            **self.launcher.resources,
        }
        self.group: Any = None
        self.lost_ids: set[str] = set()
        """Nodes whose actor died, until Ray calls them dead."""

    def look(self, plan: RunPlan) -> Availability:
        """Ask for as many nodes as the plan has, and wait a moment for them."""
        wait_while(lambda: bool(self.lost_ids & alive_nodes().keys()), _DEATH_SECONDS)
        self.lost_ids.clear()
        self.reserve(plan.hardware.nodes)
        is_ready = wait_while(lambda: not self.is_placed(), _PLACING_SECONDS)
        return self.availability(plan.hardware.nodes, is_ready=is_ready)

    def section(self, nodes: int) -> RayConfig:
        """Return the launcher's section of a plan on fewer nodes."""
        return self.launcher

    def reserve(self, nodes: int) -> None:
        """Have a group of as many bundles, placed or waiting."""
        from ray.util import placement_group, remove_placement_group

        if self.group is not None and self.group.bundle_count == nodes:
            return
        if self.group is not None:
            remove_placement_group(self.group)
        self.group = placement_group([self.bundle] * nodes, strategy="STRICT_SPREAD")

    def is_placed(self) -> bool:
        """Return True if every bundle is on a node that lives."""
        from ray.util import placement_group_table

        return bool(placement_group_table(self.group)["state"] == "CREATED")

    def availability(self, nodes: int, *, is_ready: bool) -> Availability:
        """Return how many nodes of the cluster have what a bundle asks for."""
        there = sum(
            all(node["Resources"].get(name, 0) >= amount for name, amount in self.bundle.items())
            for node in alive_nodes().values()
        )
        missing = [] if is_ready else [f"a node with {self._bundle_text()} free"]
        return Availability(is_ready=is_ready, there=min(there, nodes), missing=missing)

    def _bundle_text(self) -> str:
        return " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())


def alive_nodes() -> dict[str, Mapping[str, Any]]:
    """Return what Ray says of each live node, by its id."""
    import ray

    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


class NodeActor:
    """Ray actor of one node: starts the node's agent as its child."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def describe(self, port: int | None) -> tuple[str, str, str, int]:
        """Return the node's Ray id, host name and address, and a port that is free on it."""
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            listener.bind((address, 0))
            free = listener.getsockname()[1]
        return context.get_node_id(), socket.gethostname(), address, port or free

    def run(
        self, argv: Sequence[str], variables: Mapping[str, str], folder: str | None, log: str
    ) -> int:
        """Run the agent to its end, and return its exit code.

        Raises:
            OSError: The node does not have the log's folder or the program.
        """
        environment = {**os.environ, **variables, PARENT_VARIABLE: str(os.getpid())}
        with open(log, "ab", opener=open_as_its_folder) as stream:
            self._process = subprocess.Popen(
                argv,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        return self._process.wait()

    def terminate(self) -> None:
        """Have the agent end its ranks."""
        if self._process is not None:
            self._process.terminate()


class RayAgents(NodeAgents):
    """Agents in actors, which are started as soon as all nodes are reserved.

    Signals and requests to stop are followed while the actors start.
    """

    def __init__(self, prepared: PreparedAttempt, pool: RayPool, launch: LaunchRequest) -> None:
        super().__init__(prepared.request, [])
        self._prepared = prepared
        self._pool = pool
        self._launch = launch
        self._started_at = time.monotonic()
        self._is_waiting_recorded = False
        self._actors: list[Any] = []
        self._answers: list[Any] = []
        self._answers_due = 0.0
        self._node_ids: list[str] = []
        self._ends: list[Any] = []
        self._errors: dict[int, str] = {}
        pool.reserve(prepared.request.plan.hardware.nodes)

    def poll(self) -> int | None:
        if self._ends:
            return super().poll()
        if self._terminated_at is not None:
            self._code = int(ExitCode.terminated)
        elif is_requested(self._run, Request.stop):  # and no rank is there to follow it
            file_request(self._run, Request.end, "its agents were not started yet")
        elif self._actors or self._pool.is_placed():
            self._try_to_start()
        else:
            self._wait_for_nodes()
        return self._code

    def _wait_for_nodes(self) -> None:
        waited = time.monotonic() - self._started_at
        nodes = self._prepared.request.plan.hardware.nodes
        if waited > _PLACING_SECONDS and not self._is_waiting_recorded:
            self._is_waiting_recorded = True
            record_waiting(self._launch, self._pool.availability(nodes, is_ready=False))
        if waited > self._pool.launcher.node_wait_seconds:
            raise MachineError(
                why_not(self._pool.availability(nodes, is_ready=False), nodes),
                hint="launcher.node_wait_seconds waits longer",
            )

    def _try_to_start(self) -> None:
        """Start the agents once all actors answer, unless a node is lost meanwhile: its bundle is
        then placed again.

        Raises:
            TrainctlError: Actors cannot be started on nodes that live (exit code 4).
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            if not self._actors:
                self._make_actors()
            _, missing = ray.wait(self._answers, num_returns=len(self._answers), timeout=0)
            if not missing:
                self._start(ray.get(self._answers))
            elif time.monotonic() > self._answers_due:
                raise GetTimeoutError(
                    f"{len(missing)} of {len(self._answers)} actors did not start in "
                    f"{_ANSWER_SECONDS:.0f} s"
                )
        except RayError as error:
            self._kill()
            self._actors = []
            if not wait_while(self._pool.is_placed, _DEATH_SECONDS):
                raise MachineError(
                    f"Ray cannot start an agent: {str(error).strip().splitlines()[-1]}",
                    hint="all nodes need the environment of this run at launcher.python",
                ) from None

    def _make_actors(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._pool.bundle
        self._actors = [
            ray.remote(NodeActor)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources=self._pool.launcher.resources,
                max_concurrency=2,  # `terminate` beside `run`
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._pool.group, placement_group_bundle_index=node.node
                ),
            )
            .remote()
            for node in self._prepared.rendered.command.nodes
        ]
        port = self._pool.launcher.port
        self._answers = [actor.describe.remote(port) for actor in self._actors]
        self._answers_due = time.monotonic() + _ANSWER_SECONDS

    def _start(self, found: Sequence[tuple[str, str, str, int]]) -> None:
        """Start the agents on nodes that `NodeActor.describe` has described."""
        request, nodes = self._prepared.request, self._prepared.rendered.command.nodes
        self._node_ids = [node_id for node_id, *_ in found]
        self.hosts = [host for _, host, *_ in found]
        _, _, address, port = found[0]
        first = {RENDEZVOUS_VARIABLE: f"{address}:{port}"} if len(nodes) > 1 else {}
        folder = None if request.folder is None else str(request.folder)
        for actor, node in zip(self._actors, nodes, strict=True):
            tag = replace(self._prepared.tag, node=node.node)
            variables = {**node.environment, **tag.environment(), **first}
            log = str(self._attempt.agent_log(node.node))
            self._ends.append(actor.run.remote(list(node.argv), variables, folder, log))

    def _codes(self) -> list[int | None]:
        import ray

        ended, _ = ray.wait(self._ends, num_returns=len(self._ends), timeout=0)
        codes = [
            self._code_of(node) if end in ended else None for node, end in enumerate(self._ends)
        ]
        self._pool.lost_ids.update(
            node_id for node_id, code in zip(self._node_ids, codes, strict=True) if code == LOST
        )
        return codes

    def _code_of(self, node: int) -> int:
        """Return the exit code of an agent; `LOST` if its actor died, with its node or alone."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return int(ray.get(self._ends[node]))
        except RayTaskError as error:
            self._errors[node] = str(error.cause)
            return int(ExitCode.environment)
        except RayError:
            return LOST

    def describe_death(self) -> dict[str, Any]:
        for node, error in self._errors.items():
            message = f"node {node} ({self.hosts[node]}): cannot start the agent: {error}"
            hint = "all nodes need the run directory, and this run's environment"
            return self._failure(node, message, Cause.reported) | {"hint": hint}
        return super().describe_death()

    def _order_end(self) -> None:
        for actor in self._actors:
            actor.terminate.remote()

    def _kill(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)

    def _clean_nodes(self, nodes: Sequence[int]) -> list[int]:
        self._kill()  # also frees the bundles for the next attempt
        return [node for node in nodes if self._node_ids[node] not in self._pool.lost_ids]
