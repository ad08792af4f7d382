"""Generalisation of the memory budget: each source of measurements predicted without its own rows.

    python scripts/benchmarks/memory_holdout.py [CSV ...]

Four constants of the budget were fitted to published measurements instead of read from code. This
script fits them again to all sources except one, in turn. It scores the remaining source with the
fitted constants and with the shipped ones. A constant that the other sources do not determine gets
a value from elsewhere, or 0. Then all rows are scored in three groups: used for the fit, unseen,
and refused with the reason. The unseen group also reports how many rows lie within the budget's
band, and how many are wrongly predicted to fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import memory_megatron
from memory_accuracy import MEASURED, summary
from memory_cases import Case, Tensors, bounds, case_of, estimate, tensors_of
from memory_kernels import is_kernel
from memory_metrics import NotExpressible
from memory_rows import GIB, Metric, Row, read_rows

from trainctl.memory import constants
from trainctl.memory.budget import runtime_range

MIB = 2**20
SHIPPED_REMAINDER = memory_megatron.REMAINDER
Values = Mapping[str, float]

GRID: dict[str, Sequence[float]] = {
    "fragmentation": [step / 100 for step in range(0, 26)],
    "fragmentation, large tensors": [step / 200 for step in range(0, 21)],
    "communicator, GiB": [step / 20 for step in range(0, 33)],
    "remainder of Megatron-LM, MiB": range(0, 17),
}
"""Fitted constants, with the values that the search tries."""

UNSEEN: Values = {
    "fragmentation": 0.0,
    "fragmentation, large tensors": 0.0,
    "communicator, GiB": 1.45,
    "remainder of Megatron-LM, MiB": 0.0,
}
"""Values for constants that the rows do not determine: no waste, and the communicator memory that
stas00/ml-engineering measured at a first barrier.
"""


def as_shipped() -> dict[str, float]:
    """Return the shipped constants."""
    return {
        "fragmentation": constants.FRAGMENTATION.usual,
        "fragmentation, large tensors": constants.FRAGMENTATION_LARGE.usual,
        "communicator, GiB": constants.COMMUNICATOR.usual / GIB,
        "remainder of Megatron-LM, MiB": memory_megatron.REMAINDER / MIB,
    }


@contextmanager
def put(values: Values) -> Iterator[None]:
    """Use other constants within the context."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Row with the bytes of its tensors under the shipped constants."""

    case: Case
    tensors: Tensors

    def at(self) -> tuple[Case, Tensors]:
        """Return case and tensors under the current constants; only Megatron's remainder changes
        the tensors.
        """
        case, tensors = replace(self.case, runtime=runtime_range(self.case.plan)), self.tensors
        if not isinstance(case.trainer, memory_megatron.Job):
            return case, tensors
        more = memory_megatron.REMAINDER - SHIPPED_REMAINDER
        return case, replace(
            tensors, after_step=tensors.after_step + more, peak=tensors.peak + more
        )


def errors(known: Sequence[Known], values: Values) -> list[float]:
    """Return the relative errors of some rows with these constants."""
    with put(values):
        relative_errors = []
        for each in known:
            case, tensors = each.at()
            row = case.row
            assert row.metric is not None and row.measured is not None
            relative_errors.append(estimate(case, tensors).of(row.metric) / row.measured - 1)
    return relative_errors


def sides(known: Sequence[Known], values: Values) -> list[int]:
    """Return for each row whether it lies below the band (-1), within (0) or above (1)."""
    with put(values):
        signs = []
        for each in known:
            case, tensors = each.at()
            low, high = bounds(case, tensors)
            measured = case.row.measured or 0
            signs.append((measured > high) - (measured < low))
    return signs


def fit(cases: Sequence[Known]) -> dict[str, float]:
    """Return the constants with the least mean error over some rows, by coordinate descent.

    Constants without influence on these rows keep their `UNSEEN` value.
    """
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


def _loss(cases: Sequence[Known], values: Values) -> float:
    sizes = [abs(error) for error in errors(cases, values)]
    return sum(sizes) / len(sizes)


def read_cases(paths: Sequence[Path]) -> tuple[list[Known], list[tuple[Row, str]]]:
    """Read the training jobs that can be scored, and the others with the reason."""
    known, refused = [], []
    for row in (row for path in paths for row in read_rows(path)):
        if row.metric in (Metric.fits, Metric.out_of_memory) or is_kernel(row):
            continue
        try:
            case = case_of(row)
        except NotExpressible as reason:
            refused.append((row, str(reason)))
            continue
        known.append(Known(case=case, tensors=tensors_of(case)))
    return known, refused


def percent(sizes: Sequence[float]) -> str:
    """Format median, 90th percentile and worst."""
    median, ninetieth, worst = (f"{100 * figure:.1f} %" for figure in summary(sizes))
    return f"median {median:>7}, 90th {ninetieth:>7}, worst {worst:>7}"


def print_fold(title: str, held_out: Sequence[Known], values: Values) -> None:
    """Print the errors of the left-out rows, with the shipped constants and with those of the
    others.
    """
    print(f"\n{title}: {len(held_out)} rows")
    print(f"  as shipped  {percent(errors(held_out, as_shipped()))}")
    print(f"  left out    {percent(errors(held_out, values))}")
    print("  " + ", ".join(f"{name} {value:g}" for name, value in values.items()))


def is_ours(known: Known) -> bool:
    """Return True for full training or adapters on DeepSpeed, as trainctl runs them."""
    return known.case.trainer is None


def print_groups(
    known: Sequence[Known],
    unseen: Sequence[tuple[Known, Values]],
    refused: Sequence[tuple[Row, str]],
) -> None:
    """Print the scores of the fitted rows, of each left-out source, and the refused rows."""
    print(f"\nFitted to: {len(known)} rows of {len(known) + len(refused)}")
    shipped = errors(known, as_shipped())
    print(f"  all          {len(known):>3}  {percent(shipped)}")
    ours = [error for error, each in zip(shipped, known, strict=True) if is_ours(each)]
    print(f"  on DeepSpeed {len(ours):>3}  {percent(ours)}")
    alone = [(each, errors([each], values)[0], sides([each], values)[0]) for each, values in unseen]
    print("\nUnseen: constants fitted without the row's source")
    for name, some in (("all", alone), ("on DeepSpeed", [row for row in alone if is_ours(row[0])])):
        print(f"  {name:<12} {len(some):>3}  {percent([error for _, error, _ in some])}")
        inside = sum(side == 0 for _, _, side in some)
        above = sum(side > 0 for _, _, side in some)
        print(
            f"  {'':<12}      within the band {100 * inside / len(some):.0f} %, above it {above},"
            f" below it {len(some) - inside - above}"
        )
    print("  above the band, so falsely said to fit a device of just its upper end:")
    for each, error, side in alone:
        if side > 0:
            print(f"    {100 * error:>+6.1f} %  {each.case.row.id}")
    print(f"\nRefused: {len(refused)} rows")
    for row, reason in refused:
        print(f"  {row.id}: {reason}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("csv", nargs="*", type=Path, default=MEASURED, help="measurements")
    known, refused = read_cases(parser.parse_args(argv).csv)
    print(f"All {len(known)} rows fitted together: {fit(known)}")
    unseen: list[tuple[Known, Values]] = []
    for source in sorted({each.case.row["source_repo"] for each in known}):
        mine = [each for each in known if each.case.row["source_repo"] == source]
        values = fit([each for each in known if each.case.row["source_repo"] != source])
        print_fold(source, mine, values)
        unseen += [(each, values) for each in mine]
    print_groups(known, unseen, refused)
    return 0


if __name__ == "__main__":
    sys.exit(main())
