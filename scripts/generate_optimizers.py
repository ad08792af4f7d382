"""Write the tables of docs/optimizers.md from the optimizers' specs; `--check` only compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trainctl.config.registry import load_specs, new_section
from trainctl.config.schema import (
    Accelerator,
    ModelConfig,
    OffloadDevice,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.options.optimizer import Optimizer
from trainctl.plans.optimizers import optimizer_maker

TARGET = Path(__file__).parents[1] / "docs" / "optimizers.md"
MARKS = ("<!-- table -->", "<!-- end of table -->")

HARDWARE = {
    kind: Hardware(name=kind.value, accelerator=kind, nodes=1, devices_per_node=1)
    for kind in (Accelerator.cpu, Accelerator.cuda)
}


def table() -> str:
    """Return both tables as Markdown."""
    return "\n".join([*_allowed(), "", *_refused()])


def _allowed() -> Iterator[str]:
    heads = "kind", "made by", "one element needs", "ZeRO", "states in", "tensor parallel"
    yield f"| {' | '.join(heads)} | bf16 states |"
    yield "|---|---|---|---|---|---|---|"
    for can in load_specs("optimizer"):
        stages = f"{min(can.stages)} to {max(can.stages)}"
        places = ["device" if place is OffloadDevice.none else place.value for place in can.offload]
        cells = (
            f"`{can.name}`",
            _makers(can),
            can.needs,
            stages,
            ", ".join(places),
            "yes" if can.tensor else "no",
            "yes" if can.low_precision_states else "no",
        )
        yield f"| {' | '.join(cells)} |"


def _makers(can: Optimizer) -> str:
    """Name the implementation used in each place; a single name if all places use the same."""
    places_by_maker: dict[str, list[str]] = {}
    for hardware, place in ((Accelerator.cuda, "a GPU"), (Accelerator.cpu, "a CPU")):
        config = RunConfig(model=ModelConfig(), optimizer=new_section("optimizer", can.name))
        places_by_maker.setdefault(optimizer_maker(config, HARDWARE[hardware]).value, []).append(
            f"on {place}"
        )
    if OffloadDevice.cpu in can.offload:
        config.offload.optimizer = OffloadDevice.cpu
        places_by_maker.setdefault(
            optimizer_maker(config, HARDWARE[Accelerator.cpu]).value, []
        ).append("offloaded")
    if len(places_by_maker) == 1:
        return next(iter(places_by_maker))
    return "; ".join(f"{name} ({', '.join(places)})" for name, places in places_by_maker.items())


def _refused() -> Iterator[str]:
    words = {
        "cpu": "states in host memory",
        "nvme": "states on NVMe",
        "tensor": "tensor parallelism",
        "states": "bf16 states or master weights",
    }
    yield "| what is refused | kinds | why |"
    yield "|---|---|---|"
    reasons: dict[tuple[str, str], list[str]] = {}
    for can in load_specs("optimizer"):
        for what, why in can.why_not.items():
            reasons.setdefault((what, why), []).append(f"`{can.name}`")
    for (what, why), kinds in sorted(
        reasons.items(), key=lambda item: list(words).index(item[0][0])
    ):
        yield f"| {words[what]} | {', '.join(kinds)} | {why} |"


def main(arguments: list[str]) -> int:
    """Write the tables, or with `--check` report whether they are up to date."""
    old = TARGET.read_text(encoding="utf-8")
    start, end = (re.escape(mark) for mark in MARKS)
    new = re.sub(
        f"(?s){start}.*?{end}", lambda _: f"{MARKS[0]}\n{table()}\n{MARKS[1]}", old, count=1
    )
    if "--check" in arguments:
        if old != new:
            print("docs/optimizers.md is out of date: run `make docs`", file=sys.stderr)
        return int(old != new)
    TARGET.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
