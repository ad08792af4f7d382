"""The budget's table: golden files, and properties of its bars."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.monitor.plan_text import BAR_WIDTH, budget_lines

GOLDEN = Path(__file__).parent / "golden"
GIB = 2**30
COMPONENTS = (
    "parameters",
    "gradients",
    "master_weights",
    "optimizer_states",
    "activations",
    "logits",
    "communication_buffers",
    "gathered_parameters",
    "retained_weights",
    "step_transient",
    "runtime",
)


def make_budget(sizes: list[int], *, capacity: int, fits: bool | None) -> dict[str, Any]:
    components = dict(zip(COMPONENTS, sizes, strict=True))
    peak = sum(sizes)
    return {
        "schema": 1,
        "fits": fits,
        "device_capacity_bytes": capacity,
        "device_peak_bytes": peak,
        "device_peak_low_bytes": peak * 9 // 10,
        "device_peak_high_bytes": peak * 11 // 10,
        "device_reserved_bytes": 0,
        "peak_phase": "backward_start",
        "phases": {
            "load": peak // 4,
            "forward_end": peak // 2,
            "backward_start": peak,
            "backward_end": peak // 2,
            "step": peak // 3,
        },
        "components": components,
        "stages": [{"pipeline_stage": 0, "peak_bytes": peak, "components": components}],
        "host": {"bytes_per_node": 0, "components": {}},
        "nvme_bytes_per_node": 0,
        "checkpoint_bytes": 12 * GIB,
        "checkpoints_kept_bytes": 36 * GIB,
        "weights_only_bytes": 0,
        "weights_only_kept_bytes": 0,
        "notes": [],
    }


def everything() -> dict[str, Any]:
    """Two stages, host and NVMe memory, a note, larger than the device."""
    sizes = [int(part * GIB) for part in (3.25, 3.25, 0, 0, 8.5, 2, 1.5, 0.8, 0, 0.4, 1)]
    budget = make_budget(sizes, capacity=16 * GIB, fits=False)
    worst = budget["stages"][0]
    budget["stages"] = [worst | {"peak_bytes": GIB}, worst | {"pipeline_stage": 1}]
    budget["device_reserved_bytes"] = 2 * GIB
    budget["host"] = {
        "bytes_per_node": 120 * GIB,
        "components": {"optimizer_states": 100 * GIB, "gradients": 20 * GIB, "parameters": 0},
    }
    budget["nvme_bytes_per_node"] = 300 * GIB
    budget["notes"] = ["activations are estimated for sdpa attention"]
    return budget


CASES = {
    "fits": (make_budget([GIB * n for n in range(11)], capacity=80 * GIB, fits=True), None),
    "too_close": (make_budget([GIB] * 11, capacity=11 * GIB, fits=None), None),
    "everything": (everything(), 256 * GIB),
    "small": (make_budget([2**20] * 11, capacity=GIB, fits=True), None),
    "capacity_unknown": (make_budget([GIB] * 11, capacity=0, fits=None), None),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    budget, host = CASES[name]
    text = "\n".join(budget_lines(budget, host)) + "\n"
    path = GOLDEN / f"budget_{name}.txt"
    if os.environ.get("TRAINCTL_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_without_unicode_the_table_is_ascii() -> None:
    text = "\n".join(budget_lines(everything(), 256 * GIB, unicode_bars=False))
    assert text.isascii()
    assert "#" in text


@given(st.lists(st.integers(0, 2**45), min_size=11, max_size=11), st.integers(0, 2**45))
def test_bars_never_exceed_their_width_and_zero_components_are_left_out(
    sizes: list[int], capacity: int
) -> None:
    lines = budget_lines(make_budget(sizes, capacity=capacity, fits=None), None, unicode_bars=False)
    bars = [line.count("#") for line in lines]
    assert max(bars) <= BAR_WIDTH
    # Each component is rounded by at most half a cell.
    assert sum(bars) <= BAR_WIDTH + 0.5 * len(sizes)
    shown = {line.split()[0] for line in lines[1:]} & set(COMPONENTS)
    assert shown == {name for name, size in zip(COMPONENTS, sizes, strict=True) if size}
