"""Cost of a step in CSV and in an Arrow IPC stream: bytes, appending, reading the end, reading all.

    python scripts/benchmarks/step_formats.py [--steps 1000000] [--columns 40] [--folder FOLDER]

Each row is written before the next step, as in a run's records: CSV by a `write`, an Arrow stream
by a record batch per row. A stream with a batch per hundred rows shows what buffering would save; a
killed run would lose the buffer. Times are CPU seconds of a process of its own.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.csv

from trainctl.runs.records import EventWriter, events_from_end, iter_events

TAIL = 100


def rows(steps: int, columns: int) -> Iterator[dict[str, Any]]:
    """Yield the values of each step: integers, floats with all digits, and rounded ones."""
    draw = random.Random(0)
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"step": step, "time": 1.7e9 + step / 2, "tokens": step * 524_288}
        row["loss"] = 2 + 8 / math.sqrt(step) + draw.gauss(0, 0.02)
        for index in range(columns - 6):  # every row has two more columns
            value = abs(draw.gauss(1, 0.1))
            row[f"norm{index}"] = value if index < 4 else float(f"{value:.8g}")
        yield row


def write_csv(folder: Path, steps: int, columns: int) -> Path:
    """Write with trainctl's own writer."""
    with EventWriter(folder / "events.jsonl", 1) as writer:
        for row in rows(steps, columns):
            writer.write("step", **row)
    return folder / "steps" / "attempt-1.csv"


def write_arrow(folder: Path, steps: int, columns: int, rows_of_batch: int) -> Path:
    """Write a stream with a batch for every `rows_of_batch` rows, each flushed."""
    path, waiting = folder / "steps.arrows", list[dict[str, Any]]()
    first = next(rows(1, columns))
    schema = pa.schema(
        [
            (name, pa.int64() if isinstance(value, int) else pa.float64())
            for name, value in first.items()
        ]
    )
    with path.open("ab", buffering=0) as stream, pa.ipc.new_stream(stream, schema) as writer:
        for row in rows(steps, columns):
            waiting.append(row)
            if len(waiting) == rows_of_batch:
                writer.write_batch(pa.RecordBatch.from_pylist(waiting, schema))
                waiting = []
    return path


def nothing(folder: Path, steps: int, columns: int) -> Path:
    """Generate the rows only; subtract this time to get that of a format."""
    for _ in rows(steps, columns):
        pass
    return folder


def csv_end(path: Path) -> int:
    events = events_from_end(path.parents[1] / "events.jsonl", "step")
    return sum(1 for _, _ in zip(range(TAIL), events, strict=False))


def csv_all(path: Path) -> int:
    return sum(1 for _ in iter_events(path.parents[1] / "events.jsonl", "step"))


def csv_pandas(path: Path) -> int:
    return len(pandas.read_csv(path))


def csv_pyarrow(path: Path) -> int:
    return int(pyarrow.csv.read_csv(path).num_rows)


def arrow_end(path: Path) -> int:
    """Read the end of a stream: its batches have no index, so all are passed."""
    last: list[Any] = []
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        for batch in reader:
            last = [*last, batch][-TAIL:]
    return min(TAIL, sum(batch.num_rows for batch in last))


def arrow_all(path: Path) -> int:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        return int(reader.read_all().num_rows)


def measured(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the processor seconds that a call takes in a process of its own, and its result."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def timed() -> None:
        started = time.process_time()
        result = call(*arguments)
        sender.send((time.process_time() - started, result))

    process = context.Process(target=timed)
    process.start()
    received = receiver.recv()
    process.join()
    return received  # type: ignore[no-any-return]


def main() -> None:
    """Measure, and print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="folder of the files; default: a temporary one")
    given = parser.parse_args()
    size = (given.steps, given.columns)
    pandas_, arrow_ = {"pandas": csv_pandas, "pyarrow": csv_pyarrow}, {"pyarrow": arrow_all}
    formats: dict[str, tuple[Any, tuple[int, ...], Any, dict[str, Any]]] = {
        "CSV, a row at a time": (write_csv, (), csv_end, {"trainctl": csv_all, **pandas_}),
        "Arrow, a row at a time": (write_arrow, (1,), arrow_end, arrow_),
        "Arrow, 100 rows at a time": (write_arrow, (100,), arrow_end, arrow_),
    }
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        base, _ = measured(nothing, Path(folder), *size)
        for name, (write, more, read_end, readers) in formats.items():
            seconds, path = measured(write, Path(folder), *size, *more)
            parts = [f"{path.stat().st_size / 1e6:,.0f} MB"]
            parts.append(f"{(seconds - base) / given.steps * 1e6:.1f} us a row")
            parts.append(f"the last {TAIL}: {measured(read_end, path)[0]:.4f} s")
            for reader, read in readers.items():
                taken, count = measured(read, path)
                parts.append(f"all {count:,} by {reader}: {taken:.1f} s")
            path.unlink()
            print(f"{name}: {'; '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
