"""Configurations that the Slurm launcher refuses."""

from __future__ import annotations

from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.launch.quoting import check_options, check_words
from trainctl.options.launcher import section_of
from trainctl.options.launcher.slurm import SlurmConfig


def check_config(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return a finding for each value that a job script cannot hold, or that sbatch refuses."""
    launcher = section_of(config, SlurmConfig)
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
    return [
        *check_words(named),
        *check_options("launcher.slurm_options", launcher.slurm_options),
    ]
