"""Rates of detected devices that no driver reports: from the options of `hardware`.

`conf/hardware/` is the one table of peak rates and bandwidths, each file with its source.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trainctl.config.catalog import options
from trainctl.config.schema import HardwareConfig
from trainctl.config.yaml_files import read_document

RATES = (
    *(item.name for item in fields(HardwareConfig) if item.name.startswith("peak_tflops_")),
    "memory_bandwidth_gb_per_second",
    "device_link_gb_per_second",
    "network_gb_per_second",
    "host_link_gb_per_second",
    "matrix_efficiency",
    "attention_efficiency",
)
"""Keys taken from the option. Memory and number formats are detected on the device itself."""


def known_rates(driver_name: str) -> dict[str, float]:
    """Return the rates of the option whose `driver_names` has this name; empty if there is none.

    Only whole names match: a card with the same chip in another form (PCIe, NVL) has other rates.
    """
    for option in options("hardware"):
        document = read_document(option.path, option.name)
        facts: dict[str, Any] = {setting.key: setting.value for setting in document.settings}
        if driver_name in (facts.get("driver_names") or []):
            return {key: float(facts[key]) for key in RATES if facts.get(key) is not None}
    return {}
