"""How far fitted constants carry: each source of measurements is predicted unseen.

    python scripts/benchmarks/memory_holdout.py [CSV ...]

Four constants of the budget were fitted to published measurements, not read off code. Here they are
fitted again to all sources but one, in turn, and the one left out is scored with what came of it,
next to its score with the constants as they are. A constant that the other sources tell nothing
about has no value of its own then: it is put to what is said of it elsewhere, or to 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import memory_megatron
from memory_accuracy import DATA, summary
from memory_cases import Case, case_of, estimate
from memory_kernels import is_kernel
from memory_metrics import NotExpressible
from memory_rows import GIB, read_rows

from trainctl.memory import constants
from trainctl.memory.runtime import runtime_of

MIB = 2**20
Values = Mapping[str, float]

GRID: dict[str, Sequence[float]] = {
    "fragmentation": [step / 100 for step in range(0, 26)],
    "fragmentation, large tensors": [step / 200 for step in range(0, 21)],
    "communicator, GiB": [step / 20 for step in range(0, 33)],
    "remainder of Megatron-LM, MiB": range(0, 17),
}
"""The fitted constants, and the values that each is tried with."""

UNSEEN: Values = {
    "fragmentation": 0.0,
    "fragmentation, large tensors": 0.0,
    "communicator, GiB": 1.45,
    "remainder of Megatron-LM, MiB": 0.0,
}
"""Where nothing tells: no waste, and what stas00/ml-engineering saw at a first barrier."""


def as_shipped() -> dict[str, float]:
    """The constants as they are."""
    return {
        "fragmentation": constants.FRAGMENTATION.usual,
        "fragmentation, large tensors": constants.FRAGMENTATION_LARGE.usual,
        "communicator, GiB": constants.COMMUNICATOR.usual / GIB,
        "remainder of Megatron-LM, MiB": memory_megatron.REMAINDER / MIB,
    }


@contextmanager
def put(values: Values) -> Iterator[None]:
    """The constants put to other values for a while."""
    module: Any = constants
    before = (
        module.FRAGMENTATION,
        module.FRAGMENTATION_LARGE,
        module.COMMUNICATOR,
        memory_megatron.REMAINDER,
    )
    usual, large, communicator, remainder = (values[name] for name in GRID)
    module.FRAGMENTATION = replace(before[0], usual=usual)
    module.FRAGMENTATION_LARGE = replace(before[1], usual=large)
    module.COMMUNICATOR = replace(before[2], usual=int(communicator * GIB))
    memory_megatron.REMAINDER = int(remainder * MIB)
    try:
        yield
    finally:
        module.FRAGMENTATION, module.FRAGMENTATION_LARGE, module.COMMUNICATOR = before[:3]
        memory_megatron.REMAINDER = before[3]


def errors(cases: Sequence[Case], values: Values) -> list[float]:
    """Relative errors of some rows with these constants."""
    with put(values):
        found = []
        for case in cases:
            row = case.row
            assert row.metric is not None and row.measured is not None
            current = replace(case, runtime=runtime_of(case.plan))
            found.append(estimate(current).of(row.metric) / row.measured - 1)
    return found


def fit(cases: Sequence[Case]) -> dict[str, float]:
    """The constants with the least mean error over some rows, one after another until none moves;
    those that make no difference to them stay unseen."""
    values = dict(UNSEEN)
    for _ in range(8):
        before = dict(values)
        for name, grid in GRID.items():
            losses = {at: _loss(cases, values | {name: at}) for at in grid}
            if max(losses.values()) - min(losses.values()) > 1e-9:
                values[name] = min(grid, key=lambda at: losses[at])
        if values == before:
            break
    return values


def _loss(cases: Sequence[Case], values: Values) -> float:
    sizes = [abs(error) for error in errors(cases, values)]
    return sum(sizes) / len(sizes)


def read_cases(paths: Sequence[Path]) -> list[Case]:
    """Training jobs of some CSVs that can be scored."""
    cases = []
    for row in (row for path in paths for row in read_rows(path)):
        if row.measured is None or is_kernel(row):
            continue
        try:
            cases.append(case_of(row))
        except NotExpressible:
            continue
    return cases


def print_fold(title: str, held_out: Sequence[Case], values: Values) -> None:
    """Errors of the rows left out, as shipped and with the constants of the others."""
    shipped = summary(errors(held_out, as_shipped()))
    unseen = summary(errors(held_out, values))
    print(f"\n{title}: {len(held_out)} rows")
    for name, figures in (("as shipped", shipped), ("left out", unseen)):
        median, ninetieth, worst = (f"{100 * figure:.1f} %" for figure in figures)
        print(f"  {name:<11} median {median:>7}, 90th {ninetieth:>7}, worst {worst:>7}")
    print("  " + ", ".join(f"{name} {value:g}" for name, value in values.items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "csv", nargs="*", type=Path, default=[DATA / "memory_measurements.csv"], help="measurements"
    )
    cases = read_cases(parser.parse_args(argv).csv)
    print(f"All {len(cases)} rows fitted together: {fit(cases)}")
    left_out: list[float] = []
    for source in sorted({case.row["source_repo"] for case in cases}):
        mine = [case for case in cases if case.row["source_repo"] == source]
        values = fit([case for case in cases if case.row["source_repo"] != source])
        print_fold(source, mine, values)
        left_out += errors(mine, values)
    median, ninetieth, worst = (100 * figure for figure in summary(left_out))
    print(f"\nAll left out: median {median:.1f} %, 90th {ninetieth:.1f} %, worst {worst:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
