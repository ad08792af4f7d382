"""MPI: `mpirun` starts an agent on each node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema import LauncherConfig
from trainctl.config.schema.option import option
from trainctl.options.launcher import Launcher


class MpiFlavor(Enum):
    """Command line syntaxes of mpirun."""

    openmpi = "openmpi"
    mpich = "mpich"


@dataclass
class MpiConfig(LauncherConfig):
    """Keys of MPI."""

    mpi_program: str = option(
        "mpirun", "The program that starts processes: a name or a path.", local=True
    )
    mpi_flavor: MpiFlavor = option(MpiFlavor.openmpi, "Whose command line it understands.")
    mpi_hostfile: str | None = option(
        None,
        "File of the hosts, as that program reads it; none leaves them to a scheduler.",
        local=True,
    )
    mpi_options: list[str] = option([], "Further options of mpirun, each one word.")


SPEC = Launcher(
    name="mpi",
    keys=MpiConfig,
    build="trainctl.launch.mpi:run_launch",
    render="trainctl.launch.mpi:render",
    check="trainctl.launch.mpi:check",
    check_config="trainctl.launch.refusals.mpi:check_config",
)
