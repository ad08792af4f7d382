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
        "mpirun", "Name or path of the MPI launcher.", local=True, runs_code=True
    )
    mpi_flavor: MpiFlavor = option(
        MpiFlavor.openmpi, "MPI implementation whose command-line options mpi_program accepts."
    )
    mpi_hostfile: str | None = option(
        None,
        "Hostfile, in the format of mpi_program; none leaves the hosts to a scheduler.",
        local=True,
    )
    mpi_options: list[str] = option(
        [], "Additional options of mpirun, one word per entry.", runs_code=True
    )


SPEC = Launcher(
    name="mpi",
    keys=MpiConfig,
    build="trainctl.launchers.mpi:run_launch",
    render="trainctl.launchers.mpi:render",
    check="trainctl.launchers.mpi:check",
    check_config="trainctl.launchers.config_checks:check_mpi",
)
