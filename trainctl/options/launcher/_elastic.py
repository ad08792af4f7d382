"""Keys of the launchers that restart on the nodes that are left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainctl.config.schema import LauncherConfig
from trainctl.config.schema.option import option
from trainctl.options.launcher import KeyProblem

RESTARTS = (lambda section: section.max_restarts > 0, "launcher.max_restarts above 0")


@dataclass
class ElasticConfig(LauncherConfig):
    """Keys about restarts after a loss of nodes."""

    min_nodes: int | None = option(
        None,
        "Minimum number of nodes to continue with after nodes are lost; none waits for all.",
        minimum=1,
        needs=RESTARTS,
    )
    node_wait_seconds: float = option(
        600.0,
        "Maximum time to wait for nodes before a restart.",
        unit="seconds",
        minimum=0,
        needs=RESTARTS,
    )


def check_min_nodes(section: ElasticConfig, nodes: int) -> Iterator[KeyProblem]:
    """Yield a problem if `min_nodes` is more than the plan has."""
    if section.min_nodes is not None and section.min_nodes > nodes:
        yield KeyProblem(
            "launcher.min_nodes",
            f"launcher.min_nodes={section.min_nodes}, and the plan is for {nodes}",
            f"launcher.min_nodes={nodes} or less",
        )
