"""Check whether the best learning rate of a narrow model suits a wide one, with and without muP.

    python scripts/mup_transfer.py [--widths 32,64 --exponents=-9,-8] [--fresh]

Trains a byte-level model of each width at each learning rate on Python's standard library, with the
real trainer in one process; about twelve minutes of one core in all. Results go to `docs/mup.csv`
after each run, so that a second call continues where the first was stopped, and to `docs/mup.png`;
`docs/mup.md` discusses them. Without muP the initial matrices also shrink as 1 / sqrt(width), so
that only learning rates and multipliers are compared, and not an initialisation that ignores the
width.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from fork_server import RanksFailed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rank_processes import Case, tiny_config, tiny_plan, train_cases

from trainctl.cli.console import Meter
from trainctl.config.schema import DataType, RunConfig
from trainctl.monitor.report.figure import save_figure
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTHS = (32, 64, 128, 256)
BASE = WIDTHS[0]
HEAD_DIM = 16
EXPONENTS = tuple(range(-10, -4))
"""Learning rates as exponents of two."""
SEEDS = (7, 8)
"""Seeds of the initial weights and of the sample order."""
STEPS = 150
COLUMNS = ("mup", "width", "lr_exponent", "seed", "loss")
BASE_DEVIATION = 0.1
"""Standard deviation of the initial matrices at the base width."""

Run = tuple[bool, int, int, int]
"""Key of a run: with muP or not, width, exponent of the learning rate, seed."""


def config_of(mup: bool, width: int, exponent: int, seed: int) -> RunConfig:
    """Return the configuration of two blocks of this width; the head size is fixed, everything else
    is proportional.
    """
    config = tiny_config(
        steps=STEPS, seed=seed, sequence_length=64, global_batch_size=8, evaluation_samples=128
    )
    config.training.gradient_accumulation_steps = 1
    model = config.model
    model.num_layers, model.hidden_size, model.intermediate_size = 2, width, 3 * width
    model.num_attention_heads = width // HEAD_DIM
    model.num_key_value_heads = width // HEAD_DIM // 2
    model.initializer_range = BASE_DEVIATION
    if mup:
        model.mup, model.mup_base_width = True, BASE
    else:
        model.initializer_range *= math.sqrt(BASE / width)
    config.precision.compute = DataType.fp32
    config.zero_stage.stage = 0
    config.optimizer.lr, config.optimizer.weight_decay = 2.0**exponent, 0.0
    config.schedule.warmup_steps = 15
    config.checkpoint.at_end = False
    config.training.sample_tokens = 0
    return config


def held_out_loss(run: Run) -> float:
    """Train, and return the held-out loss in nats per byte; infinite if training diverged."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        try:
            train_cases(1, [Case(tiny_plan(config_of(*run), 1), paths)])
        except RanksFailed as error:  # the exception of a rank arrives as text
            if "the loss of step" in str(error):
                return math.inf
            raise
        events = read_events(paths.events)
        losses = [event["loss"] for event in events if event["event"] == "evaluation"]
    return float(losses[-1])


def main() -> int:
    """Train every run that has no result yet, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--exponents", default=",".join(map(str, EXPONENTS)))
    parser.add_argument("--fresh", action="store_true", help="discard existing results")
    parser.add_argument("--output", type=Path, default=DOCS / "mup")
    arguments = parser.parse_args()
    table, chart = arguments.output.with_suffix(".csv"), arguments.output.with_suffix(".png")
    losses = {} if arguments.fresh or not table.is_file() else read(table)
    todo = [
        (mup, int(width), int(exponent), seed)
        for seed in SEEDS
        for width in arguments.widths.split(",")
        for exponent in arguments.exponents.split(",")
        for mup in (True, False)
    ]
    with Meter() as meter:
        for number, run in enumerate(todo):
            meter("learning rates", number, len(todo))
            if run not in losses:
                losses[run] = held_out_loss(run)
                write(table, losses)
    save_figure(draw(losses), chart, title="Learning-rate transfer")
    for mup in (True, False):
        print(f"{'with' if mup else 'without'} muP, best learning rate by width:")
        for width, exponent, loss in best(losses, mup):
            print(f"  {width:5}  2^{exponent}  {loss:.3f} nats a byte")
    return 0


def best(losses: Mapping[Run, float], mup: bool) -> Iterable[tuple[int, int, float]]:
    """Return, by width, the exponent with the smallest loss and that loss."""
    for width in sorted({run[1] for run in losses if run[0] == mup}):
        by_exponent = curve(losses, mup, width)
        exponent = min(by_exponent, key=lambda item: by_exponent[item])
        yield width, exponent, by_exponent[exponent]


def curve(losses: Mapping[Run, float], mup: bool, width: int) -> dict[int, float]:
    """Return the mean loss over the seeds by exponent."""
    by_exponent = defaultdict(list)
    for run, loss in sorted(losses.items()):
        if run[:2] == (mup, width):
            by_exponent[run[2]].append(loss)
    return {exponent: sum(each) / len(each) for exponent, each in by_exponent.items()}


def draw(losses: Mapping[Run, float]) -> Figure:
    """Plot loss over learning rate, one curve per width; muP on the right."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, 2, sharey=True, sharex=True))
    for place, mup in zip(axes, (False, True), strict=True):
        minima = {width: (exponent, loss) for width, exponent, loss in best(losses, mup)}
        for number, width in enumerate(minima):
            points = curve(losses, mup, width)
            place.plot(
                [2.0**exponent for exponent in points],
                list(points.values()),
                color=str(0.75 * (1 - number / max(1, len(minima) - 1))),  # wider models are darker
                marker=".",
                label=f"width {width}",
            )
        for exponent, loss in minima.values():
            place.plot([2.0**exponent], [loss], "o", color="tab:red", fillstyle="none", zorder=3)
        place.set_xscale("log", base=2)
        place.set_title(f"muP, base width {BASE}" if mup else "without muP")
        place.set_xlabel("optimizer.lr")
        place.grid(alpha=0.3)
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    axes[0].set_ylim(min(finite) - 0.05, min(finite) + 1.0)
    axes[0].set_ylabel("held-out loss, nats a byte")
    axes[0].legend(frameon=False)
    return figure


def read(table: Path) -> dict[Run, float]:
    """Read the results of an earlier call."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["mup"] == "true", *(int(row[name]) for name in COLUMNS[1:4])): float(row["loss"])
        for row in rows
    }


def write(table: Path, losses: Mapping[Run, float]) -> None:
    """Write all results in a fixed order."""
    partial = table.with_suffix(".tmp")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (mup, *numbers), loss in sorted(losses.items()):
            writer.writerow([str(mup).lower(), *numbers, f"{loss:.4f}"])
    partial.replace(table)


if __name__ == "__main__":
    sys.exit(main())
