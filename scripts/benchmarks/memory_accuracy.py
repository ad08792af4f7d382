"""Accuracy of the memory budget against published measurements, next to other estimators.

    python scripts/benchmarks/memory_accuracy.py [CSV ...] [--show ID] [--all]

Each row of a CSV becomes a plan in trainctl's own terms, whose budget is compared with the figure
that the row measured: tensors after a step, peak of tensors, reserved memory, or memory as the
driver reports it. Rows that only report that a job ran, or ran out of memory, are compared with the
verdict. Rows that cannot be expressed are listed with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import memory_peers as peers
from memory_cases import Case, case_of, estimate, fragmentation
from memory_kernels import is_kernel, kernel_bytes
from memory_rows import GIB, Metric, NotExpressible, Row, read_rows

from trainctl.config.schema import RunConfig
from trainctl.memory.budget import fits, peak_bounds

DATA = Path(__file__).parents[2] / "tests" / "data"
MEASURED = tuple(DATA / f"memory_{name}.csv" for name in ("measurements", "frameworks", "adapters"))
DEFAULT = (*MEASURED, DATA / "memory_fits.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row with a measurement, and the prediction of each estimator."""

    row: Row
    estimates: dict[str, float | None]

    def error(self, name: str) -> float | None:
        """Return the signed relative error; None where the estimator has no answer."""
        value = self.estimates[name]
        assert self.row.measured is not None
        return None if value is None else value / self.row.measured - 1


def score(row: Row) -> Scored:
    """Return the prediction of each estimator for a row.

    Raises:
        NotExpressible: The row cannot be put into our terms.
    """
    if row.unread:
        raise NotExpressible(row.unread)
    if is_kernel(row):
        ours: float = kernel_bytes(row)
        return Scored(row=row, estimates={"trainctl": ours} | dict.fromkeys(peers.PEERS))
    case = case_of(row)
    assert row.metric is not None
    estimates: dict[str, float | None] = {"trainctl": estimate(case).of(row.metric)}
    return Scored(
        row=row, estimates=estimates | {name: of(case) for name, of in peers.PEERS.items()}
    )


def verdict(row: Row) -> bool | None:
    """Return True if the estimate says that the job fits; None if undecided.

    Raises:
        NotExpressible: The row cannot be put into our terms, or names no capacity.
    """
    case = case_of(row)
    capacity = case.plan.hardware.device_memory_bytes
    if capacity is None:
        raise NotExpressible("the device's memory is not known")
    estimated = estimate(case)
    low, high = peak_bounds(estimated.components, case.runtime, fragmentation(case))
    return fits(capacity, low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Scores, verdicts and refusals of a set of rows."""

    scored: tuple[Scored, ...]
    verdicts: tuple[tuple[Row, bool | None], ...]
    refused: tuple[tuple[Row, str], ...]


def report(rows: Sequence[Row]) -> Report:
    """Score every row; collect the refused rows with their reasons."""
    scored, verdicts, refused = [], [], []
    for row in rows:
        try:
            if row.metric in (Metric.fits, Metric.out_of_memory):
                verdicts.append((row, verdict(row)))
            else:
                scored.append(score(row))
        except NotExpressible as reason:
            refused.append((row, str(reason)))
        except (ValueError, ArithmeticError, LookupError) as failure:
            refused.append((row, f"could not be read: {failure!r}"))
    return Report(scored=tuple(scored), verdicts=tuple(verdicts), refused=tuple(refused))


def summary(errors: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, 90th percentile (nearest rank) and maximum of the absolute relative
    errors.
    """
    sizes = sorted(abs(error) for error in errors)
    rank = max(0, -(-9 * len(sizes) // 10) - 1)
    return statistics.median(sizes), sizes[rank], sizes[-1]


def print_table(title: str, scored: Sequence[Scored]) -> None:
    """Print a table of each estimator's errors over some rows."""
    print(f"\n{title}: {len(scored)} rows")
    print(f"  {'estimator':<12}{'rows':>5}{'median':>10}{'90th':>10}{'worst':>10}")
    for name in ("trainctl", *peers.PEERS):
        errors = [error for item in scored if (error := item.error(name)) is not None]
        if errors:
            figures = "".join(f"{100 * value:>9.1f}%" for value in summary(errors))
            print(f"  {name:<12}{len(errors):>5}{figures}")


def print_report(scores: Report, *, every: bool) -> None:
    """Print tables, worst rows, verdicts and refusals."""
    print_table("All", scores.scored)
    for metric in Metric:
        some = [item for item in scores.scored if item.row.metric is metric]
        if some:
            print_table(metric.value, some)
    for tier in sorted({item.row["tier"] for item in scores.scored}):
        print_table(f"Tier {tier}", [item for item in scores.scored if item.row["tier"] == tier])
    order = sorted(scores.scored, key=lambda item: -abs(item.error("trainctl") or 0))
    print("\nEach row, worst first" if every else "\nWorst rows")
    for item in order if every else order[:15]:
        ours, measured = item.estimates["trainctl"] or 0, item.row.measured or 0
        print(
            f"  {100 * (item.error('trainctl') or 0):>+7.1f}%  {ours / GIB:>8.2f} of"
            f" {measured / GIB:>8.2f} GiB  {item.row.metric.value:<24}{item.row.id}"
        )
    print_verdicts(scores)
    if scores.refused:
        print("\nNot expressible")
        for row, reason in scores.refused:
            print(f"  {row.id}: {reason}")


def print_verdicts(scores: Report) -> None:
    """Print how jobs that ran, and jobs that ran out of memory, were judged."""
    if not scores.verdicts:
        return
    words = {True: "fits", False: "does not fit", None: "undecided"}
    for metric in (Metric.fits, Metric.out_of_memory):
        some = [(row, answer) for row, answer in scores.verdicts if row.metric is metric]
        counts = {word: sum(answer is key for _, answer in some) for key, word in words.items()}
        if some:
            print(
                f"\n{metric.value}, {len(some)} rows: "
                + ", ".join(f"{n} {w}" for w, n in counts.items())
            )
        for row, answer in some:
            if answer is (metric is Metric.out_of_memory):
                print(f"  WRONG: {row.id} is said: {words[answer]}")


def show(row: Row) -> None:
    """Print a row as a worked example: its configuration, and its memory by component."""
    case = case_of(row)
    usage = estimate(case)
    print(f"# {row.id}: {row['framework']}, {row['source_repo']} {row['source_path']}")
    for key, value in overrides(case):
        print(f"{key}={value}")
    for note in case.notes:
        print(f"# {note}")
    print(f"# fullest in {usage.phase}, GiB:")
    for name, size in usage.components.to_json().items():
        if size:
            print(f"#   {name:<24}{size / GIB:>9.3f}")
    print(
        f"# after a step {usage.after_step / GIB:.2f}, peak {usage.peak / GIB:.2f}, reserved"
        f" {usage.reserved / GIB:.2f}, driver {usage.driver / GIB:.2f}"
    )
    if row.measured is not None:
        ours = usage.of(row.metric)
        print(
            f"# {row.metric.value}: {ours / GIB:.2f}, measured {row.measured / GIB:.2f}"
            f" ({100 * (ours / row.measured - 1):+.1f} %)"
        )


def overrides(case: Case) -> list[tuple[str, str]]:
    """Return the config keys in which a case differs from the defaults, as overrides."""
    changed = []
    for section in fields(RunConfig):
        mine, default = getattr(case.plan.config, section.name), getattr(RunConfig(), section.name)
        if is_dataclass(mine):
            own = type(mine)()  # keys that the default kind of section does not have
            for item in fields(mine):
                value = getattr(mine, item.name)
                if value != getattr(default, item.name, getattr(own, item.name)):
                    changed.append(
                        (f"{section.name}.{item.name}", str(getattr(value, "value", value)))
                    )
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("csv", nargs="*", type=Path, default=DEFAULT, help="measurements")
    parser.add_argument("--show", metavar="ID", help="one row as a worked example")
    parser.add_argument("--all", action="store_true", help="print every row")
    options = parser.parse_args(argv)
    rows = [row for path in options.csv for row in read_rows(path)]
    if options.show:
        chosen = [row for row in rows if row.id == options.show]
        if not chosen:
            print(f"no row is called {options.show}", file=sys.stderr)
            return 1
        show(chosen[0])
        return 0
    print_report(report(rows), every=options.all)
    return 0


if __name__ == "__main__":
    sys.exit(main())
