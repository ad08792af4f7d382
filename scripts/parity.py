"""Compare layouts, ZeRO stages, offload and activation checkpointing with one process.

    python scripts/parity.py [--only layout=TP2,SP2 --only stage=3] [--fresh]

Trains a tiny model on real processes in every combination that the plan allows: the whole product
in fp32, a part of it in bf16, for the other models, and for a module that is not of transformers.
Combinations that the plan refuses are listed with the reason and never started. Results are written
to `docs/parity.csv` after each combination: a second call continues where the first was stopped,
and repeats what failed.
`tests/train/test_parity.py` runs a pairwise part of it.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import parity_cases
from fork_server import RanksFailed
from parity_cases import (
    AXES,
    CONTEXT,
    DOCUMENTS,
    MODELS,
    MODULE,
    ONE_HEAD,
    SPREADS,
    TOLERANCE,
    Combination,
    Curve,
    Difference,
    judge,
    product,
)

from trainctl.cli.console import Meter

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parity.md"
BEGIN, END = "<!-- parity tables -->", "<!-- end of parity tables -->"


@dataclass(frozen=True)
class Result:
    """Outcome of training one combination."""

    combination: Combination
    loss: float = float("inf")
    """Largest difference of a loss from one process, in nats; infinite if it failed."""
    norm: float = float("inf")
    """Largest relative difference of a gradient norm; infinite if it failed."""
    loss_limit: float = TOLERANCE
    """Allowed difference of a loss, in nats."""
    norm_limit: float = TOLERANCE
    """Allowed relative difference of a gradient norm."""
    seconds: float = 0.0
    failure: str = ""
    """The last line of what the failed rank printed."""

    @property
    def holds(self) -> bool:
        return self.loss <= self.loss_limit and self.norm <= self.norm_limit


def wanted() -> dict[str, list[Combination]]:
    """Return the combinations of each part of the page."""
    return {
        "fp32": product(precision=["fp32"], model=["llama"]),
        "bf16": product(
            precision=["bf16"], model=["llama"], offload=["none"], checkpointing=["none"]
        ),
        "models": product(
            precision=["fp32"],
            model=MODELS[1:],
            offload=["none"],
            checkpointing=["none"],
            stage=["1", "3"],
        ),
        "module": product(
            layout=[*AXES["layout"], "FSDP2"],
            precision=["fp32"],
            model=[MODULE],
            offload=["none"],
            checkpointing=["none"],
        ),
        "fsdp2": product(
            layout=["FSDP2", "HSDP4"],
            stage=["2", "3"],
            precision=["fp32"],
            model=["llama"],
            offload=["none", "cpu-all"],
            checkpointing=["none", "full"],
        ),
        "heads": [
            each
            for layout, model in (("TP4", "llama"), ("TP4", "qwen3-untied"), ("TP2", ONE_HEAD))
            for each in product(
                layout=[layout],
                precision=["fp32"],
                model=[model],
                offload=["none"],
                checkpointing=["none"],
            )
        ],
        "context": [
            combination
            for combination in product(
                layout=CONTEXT,
                precision=["fp32"],
                model=["llama", DOCUMENTS],
                offload=["none", "cpu"],
                checkpointing=["none", "full", "selective"],
            )
            if _is_wanted_of_context(combination)
        ],
    }


def _is_wanted_of_context(combination: Combination) -> bool:
    """Return True for plain layouts, recomputation with documents, and of CP2 some more."""
    chosen = combination.model, combination.checkpointing, combination.offload
    of_all = ("llama", "none", "none"), (DOCUMENTS, "full", "none")
    of_two = ("llama", "none", "cpu"), (DOCUMENTS, "selective", "none")
    return chosen in of_all or (combination.layout == "CP2" and chosen in of_two)


def main() -> int:
    """Train every combination without a result and write the page; the exit code is 1 on a failure
    or excess difference.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="AXIS=A,B", help=", ".join(AXES)
    )
    parser.add_argument("--fresh", action="store_true", help="discard existing results")
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent combinations")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    chosen = {}
    for choice in arguments.only:
        axis, _, values = choice.partition("=")
        chosen[axis] = values.split(",")
    for axis, values in chosen.items():
        if not set(values) <= {*AXES.get(axis, ()), *(CONTEXT if axis == "layout" else ())}:
            parser.error(f"--only {axis}: one of {', '.join(AXES)}, with values {AXES.get(axis)}")

    table = arguments.output.with_suffix(".csv")
    results = {} if arguments.fresh or not table.is_file() else read(table)
    legal = [c for part in wanted().values() for c in part if judge(c).plan is not None]
    results = {c: result for c, result in results.items() if c in set(legal)}
    todo = [
        combination
        for combination in legal
        if all(getattr(combination, axis) in values for axis, values in chosen.items())
        and (combination not in results or results[combination].failure)
    ]
    random.Random(0).shuffle(todo)  # so the first results predict the total time
    pool = ProcessPoolExecutor(arguments.jobs)
    try:
        with Meter() as meter:
            for result in measured(pool, todo):
                results[result.combination] = result
                write(table, results)
                if not result.holds:
                    print(result.combination, _cell(result), result.failure, file=sys.stderr)
                meter("parity", sum(c in results for c in todo), len(todo))
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    finally:  # write the page from the existing results, also when interrupted
        pool.shutdown(cancel_futures=True)
        _replace_tables(arguments.output, "\n".join(page(results)))
    wrong = sum(not result.holds for result in results.values())
    print(f"{len(results)} of {len(legal)} combinations trained, {wrong} of them off")
    return int(wrong > 0)


def measured(pool: ProcessPoolExecutor, todo: list[Combination]) -> Iterator[Result]:
    """Yield the result of each combination in the order of completion."""
    references = {c.reference for c in todo}
    references |= {c.spread for c in todo if c.spread is not None}
    names = sorted(references)
    curves = dict(zip(names, pool.map(train, names), strict=True))
    for name in (name for name in names if name == name.reference):
        assert parity_cases.clips_enough(curves[name][0]), f"{name}: clipped in too few steps"
    pending = {pool.submit(attempt, c): c for c in todo}
    for done in as_completed(pending):
        combination = pending[done]
        curve, seconds, failure = done.result()
        if curve is None:
            yield Result(combination, seconds=seconds, failure=failure)
            continue
        reference, _ = curves[combination.reference]
        spread = None
        if combination.spread is not None:
            spread = Difference.between(reference, curves[combination.spread][0])
        limit = parity_cases.limit(spread)
        difference = Difference.between(reference, curve)
        yield Result(combination, *astuple(difference), *astuple(limit), seconds=seconds)


def train(combination: Combination) -> tuple[Curve, float]:
    """Train a combination; return its curve and the seconds it took."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        curve = parity_cases.train(combination, Path(folder))
    return curve, time.monotonic() - started


def attempt(combination: Combination) -> tuple[Curve | None, float, str]:
    """Train as `train` does; on failure return the last line that a failed rank printed in place of
    the curve.
    """
    started = time.monotonic()
    try:
        return *train(combination), ""
    except RanksFailed as failed:
        return None, time.monotonic() - started, str(failed).strip().splitlines()[-1]


def read(path: Path) -> dict[Combination, Result]:
    """Read the results of earlier calls."""
    results = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            combination = Combination.of(*(row[axis] for axis in AXES))
            numbers = {
                item.name: float(row[item.name]) for item in fields(Result) if item.type == "float"
            }
            results[combination] = Result(combination, **numbers, failure=row["failure"])
    return results


def write(path: Path, results: dict[Combination, Result]) -> None:
    """Write all results by an atomic rename."""
    rows = []
    for combination, result in sorted(results.items(), key=lambda item: item[0]):
        row = {axis: getattr(combination, axis) for axis in AXES}
        values = asdict(result)
        del values["combination"]
        rows.append(row | {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in values.items()})
    if not rows:
        return
    scratch = path.with_suffix(".tmp")
    with scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    scratch.replace(path)


def page(results: dict[Combination, Result]) -> Iterator[str]:
    """Yield the lines between the marks of the page."""
    parts = wanted()
    packages = ("torch", "deepspeed", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    holding = sum(result.holds for result in results.values())
    yield f"Trained with {versions}: {len(results)} combinations, of which {holding} agree."
    yield from _product_tables(parts["fp32"], results)
    yield from ("", "## bf16")
    yield from _matrix(parts["bf16"], results, ("layout",), "stage", "ZeRO {}")
    yield from _limit(parts["bf16"], results)
    yield from ("", "## Other models, in fp32")
    yield from _matrix(parts["models"], results, ("layout", "stage"), "model", "{}")
    yield from ("", "## A module of one's own, in fp32")
    yield from _matrix(parts["module"], results, ("layout",), "stage", "ZeRO {}")
    yield from ("", "## FSDP2, and in shard groups (HSDP), in fp32")
    yield from _matrix(
        parts["fsdp2"], results, ("layout", "stage", "offload"), "checkpointing", "{}"
    )
    yield from ("", "## Key-value heads on several tensor ranks, in fp32")
    yield from _matrix(parts["heads"], results, ("layout", "model"), "stage", "ZeRO {}")
    yield from ("", "## Ring attention over context ranks, in fp32")
    columns = ("layout", "model", "checkpointing", "offload")
    yield from _matrix(parts["context"], results, columns, "stage", "ZeRO {}")
    yield from ("", "## Refused by the plan")
    yield from _refusals([c for part in parts.values() for c in part])


def _product_tables(part: list[Combination], results: dict[Combination, Result]) -> Iterator[str]:
    for layout in AXES["layout"]:
        yield from ("", f"## {layout}, in fp32")
        yield from _matrix(
            [c for c in part if c.layout == layout],
            results,
            ("stage", "offload"),
            "checkpointing",
            "{}",
        )


def _matrix(
    part: list[Combination],
    results: dict[Combination, Result],
    rows: tuple[str, ...],
    column: str,
    heading: str,
) -> Iterator[str]:
    """Format a table with a row for each trained choice on the given axes."""
    columns = [value for value in AXES[column] if any(getattr(c, column) == value for c in part)]
    yield ""
    yield f"| {' | '.join((*rows, *map(heading.format, columns)))} |"
    yield "|---" * (len(rows) + len(columns)) + "|"
    by_row: dict[tuple[str, ...], dict[str, str]] = {}
    for combination in part:
        if judge(combination).plan is not None:
            key = tuple(getattr(combination, axis) for axis in rows)
            cell = _cell(results.get(combination))
            by_row.setdefault(key, {})[getattr(combination, column)] = cell
    for key, cells in by_row.items():
        yield f"| {' | '.join((*key, *(cells.get(value, '–') for value in columns)))} |"


def _cell(result: Result | None) -> str:
    """Return the larger of the two differences; bold if it exceeds the limit."""
    if result is None:
        return "not run"
    if result.failure:
        return "**failed**"
    text = f"{max(result.loss, result.norm):.1e}"
    return text if result.holds else f"**{text}**"


def _limit(part: list[Combination], results: dict[Combination, Result]) -> Iterator[str]:
    for result in [results[c] for c in part if c in results][:1]:
        yield ""
        yield (
            f"ZeRO 1 on two processes differs from ZeRO 0 on one by "
            f"{result.loss_limit / SPREADS:.1e} in the loss and {result.norm_limit / SPREADS:.1e} "
            f"in the norm; {SPREADS:g} times that is allowed."
        )


def _refusals(combinations: Iterable[Combination]) -> Iterator[str]:
    """Count combinations by reason of refusal; a combination may have several reasons."""
    counts: Counter[tuple[str, str]] = Counter()
    refused = 0
    for combination in combinations:
        reasons = {(item.rule, item.message) for item in judge(combination).refusal}
        refused += bool(reasons)
        counts.update(reasons)
    yield ""
    yield f"{refused} combinations; some have several reasons."
    yield ""
    yield "| rule | combinations | the error |"
    yield "|---|---|---|"
    for (rule, message), count in sorted(counts.items()):
        yield f"| {rule} | {count} | {message} |"


def _replace_tables(path: Path, tables: str) -> None:
    text = path.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
