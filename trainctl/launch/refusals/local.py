"""What the local launcher refuses of a configuration."""

from __future__ import annotations

from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware


def check_config(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Nothing: all that it can lack is the machine's."""
    return []
