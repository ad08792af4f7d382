"""Published throughputs as plans: the rows of `tests/data/throughput.csv` in trainctl's terms."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.keys import convert_value, leaves
from trainctl.config.schema import HardwareConfig, RunConfig
from trainctl.hardware import Hardware
from trainctl.plans.derive import derive_batch, derive_mesh, derive_stages
from trainctl.plans.types import LayoutPlan
from trainctl.tuning.compute import OVERLAP
from trainctl.tuning.speed import step_time

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "data" / "throughput.csv"


@dataclass(frozen=True)
class Row:
    """Published measurement."""

    name: str
    table: str
    """Measurements taken under the same conditions, which may be compared with each other."""
    is_for_fit: bool
    """Whether constants of the model may be fitted to it."""
    plan: LayoutPlan
    """Plan with the parts that the step-time model reads."""
    seconds: float
    """Measured seconds of an optimizer step."""
    interleaved: int
    """Pieces of the model on each pipeline stage."""
    tensor_overlaps: bool
    """Whether tensor-parallel collectives overlapped with matrix products."""

    @property
    def predicted(self) -> float:
        """Return the modelled seconds, corrected for what DeepSpeed lacks and this run had.

        `interleaved` pieces on each stage divide the pipeline bubble by their number
        (arXiv:2104.04473, section 2.2), and Megatron's `--tp-comm-overlap` hides collectives.
        """
        time = step_time(self.plan)
        hidden = OVERLAP * time.tensor if self.tensor_overlaps else 0.0
        return time.seconds - time.bubble * (1 - 1 / self.interleaved) - hidden

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted / self.seconds - 1


@cache
def rows() -> tuple[Row, ...]:
    with TABLE.open(newline="") as file:
        return tuple(_row(line) for line in csv.DictReader(file))


def _row(line: dict[str, str]) -> Row:
    values = {
        key: convert_value(leaves()[key], yaml.safe_load(text), text)
        for key, _, text in (setting.partition("=") for setting in line["settings"].split())
    }
    nodes, devices = int(line["nodes"]), int(line["devices"])
    facts = {key.removeprefix("hardware."): v for key, v in values.items() if "hardware." in key}
    hardware = hardware_of(line["hardware"], nodes, devices, **facts)
    plan = plan_of(hardware, {k: v for k, v in values.items() if "hardware." not in k})
    rate = float(line["tokens_per_second_per_device"]) * plan.mesh.world_size
    return Row(
        name=line["id"],
        table=line["table"],
        is_for_fit=line["split"] == "fit",
        plan=plan,
        seconds=plan.batch.tokens_per_step / rate,
        interleaved=int(line["interleaved"]),
        tensor_overlaps=line["tensor_overlaps"] == "true",
    )


def plan_of(hardware: Hardware, values: Mapping[str, Any]) -> LayoutPlan:
    """Compose a plan with the given keys, as far as the step-time model reads it; no rule is
    checked.
    """
    config = config_of(values)
    mesh, _ = derive_mesh(config.parallelism, hardware)
    assert mesh is not None
    batch, _ = derive_batch(config.training, mesh.data)
    assert batch is not None
    return LayoutPlan(
        config=config,
        hardware=hardware,
        mesh=mesh,
        batch=batch,
        stage_blocks=derive_stages(config)[0],
    )


def config_of(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the given dotted keys as plain data."""
    plain = to_plain(RunConfig())
    for key, value in values.items():
        section, name = key.split(".")
        assert key in leaves(), key
        plain[section][name] = value
    return from_plain(RunConfig, plain)


def hardware_of(option: str, nodes: int, devices: int, **facts: Any) -> Hardware:
    """Return an option of `hardware` as declared, without probing this machine."""
    text = (ROOT / "conf" / "hardware" / f"{option}.yaml").read_text()
    plain = to_plain(HardwareConfig()) | yaml.safe_load(text) | facts
    config = from_plain(HardwareConfig, plain | {"nodes": nodes, "devices_per_node": devices})
    names = set(Hardware.__dataclass_fields__) & set(HardwareConfig.__dataclass_fields__)
    return Hardware(**{name: getattr(config, name) for name in names})
