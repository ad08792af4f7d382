"""Run every `gpu` test on a machine with a GPU, and compare trainctl with its plan and other loops.

    python scripts/gpu_check.py [--only NAME,...] [--minutes 25] [--again] [--devices N] [--out DIR]

Runs the tests first, then the figures of `gpu_figures.py` in their order. Each figure is a real
launch: planned against measured memory and predicted against measured speed. Some figures also
train the same model, batch and DeepSpeed JSON with a bare DeepSpeed loop, the transformers Trainer
and FSDP2, one after the other on the same devices. Each result is written as soon as it exists, to
`docs/benchmarks/gpu-DEVICE.jsonl` and to the page beside it. Existing results are not measured
again, and no figure starts after `--minutes`, so that a machine lent for a limited time can
continue later. `--only` selects figures by name.

Without a GPU everything runs at a small size as a smoke test; its results are only written to
`--out`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.comparison import Row, measure, table
from gpu_figures import FIGURES, Figure

import trainctl
from trainctl.hardware.detect import visible_devices

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests"
"""Key of the test results, used in place of a figure's name."""
NAMES = (TESTS, *(figure.name for figure in FIGURES))
PACKAGES = ("trainctl", "torch", "deepspeed", "transformers", "accelerate")

ALWAYS = (
    "model.weights=random",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "training.evaluation_samples=0",
    "training.sample_tokens=0",
    "training.gradient_accumulation_steps=2",
    "checkpoint.every_steps=null",
    "checkpoint.every_minutes=null",
    "checkpoint.at_end=false",
)
ON_CPU = ("hardware=cpu", "precision=fp32")  # many CPUs emulate bf16 products, one number at a time
PAIRS = 200
"""Number of pairs in the preference data."""


@dataclass(frozen=True, kw_only=True)
class Tests:
    """Outcome of the tests marked `gpu`."""

    passed: int
    skipped: int
    failed: tuple[str, ...]


def main() -> int:
    """Measure every missing figure; the exit code is 1 if a test or a launch of trainctl failed."""
    began = time.monotonic()
    arguments = _arguments()
    devices = visible_devices()
    on_gpu = bool(devices)
    device = devices[0].name if on_gpu else f"CPU ({platform.machine()})"
    count = arguments.devices or (len(devices) or 1)
    name = "gpu-" + device.lower().replace(" ", "-") if on_gpu else "cpu-small"
    folder = arguments.out or (ROOT / "docs" / "benchmarks" if on_gpu else None)
    results: dict[str, dict[str, Any]] = {}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        results = _read(folder / f"{name}.jsonl")
    for wanted in arguments.only:
        if wanted in results and not arguments.again:
            print(f"{wanted}: measured on {results[wanted]['date']}", file=sys.stderr)
            continue
        if time.monotonic() - began > 60 * arguments.minutes:
            print(f"{wanted} and what follows: not begun, the time is over", file=sys.stderr)
            break
        results[wanted] = {
            "name": wanted,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "versions": {package: _version(package) for package in PACKAGES},
            "devices": count,
            **_measured(wanted, count=count, on_gpu=on_gpu),
        }
        if folder is not None:
            lines = [json.dumps(results[each]) for each in NAMES if each in results]
            _write(folder / f"{name}.jsonl", "\n".join(lines) + "\n")
            _write(folder / f"{name}.md", render(results, device=device, on_gpu=on_gpu))
    print(render(results, device=device, on_gpu=on_gpu))
    if folder is None:
        print("no GPU: nothing is written without --out", file=sys.stderr)
    else:
        print(f"written: {folder / name}.md and .jsonl")
    selected = [results[each] for each in arguments.only if each in results]
    return int(any(_is_broken(each) for each in selected))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        type=_names,
        default=list(NAMES),
        help=f"of {', '.join(NAMES)}; commas between",
    )
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="no figure is started after this time"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure figures again that have results"
    )
    parser.add_argument("--devices", type=int, help="devices to use; all of them by default")
    parser.add_argument("--out", type=Path, help="folder to write to")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no such figure: {', '.join(unknown)}")
    return names


def _measured(name: str, *, count: int, on_gpu: bool) -> dict[str, Any]:
    """Return the record of the tests or of a figure."""
    if name == TESTS:
        return asdict(run_tests())
    figure = next(figure for figure in FIGURES if figure.name == name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_pairs(folder / "pairs.jsonl")
        words = overrides(figure, folder=folder, count=count, on_gpu=on_gpu)
        repeats = figure.repeats if on_gpu else 1
        measurements = measure(
            name, words, warmup=figure.warmup, peers=figure.peers, repeats=repeats
        )
        rows = list(measurements)
    print(table(rows), flush=True)
    return {"overrides": words, "rows": [asdict(row) for row in rows]}


def overrides(figure: Figure, *, folder: Path, count: int, on_gpu: bool) -> list[str]:
    """Return the overrides for `trainctl launch`.

    Args:
        folder: Holds the input files and the swapped states.
        count: Number of devices, or of processes on a CPU.
        on_gpu: Without a GPU everything is made small.
    """
    options = [option.format(folder=folder) for option in figure.options]
    if not on_gpu:
        options = [option for option in options if not option.startswith("precision=")]
    return [
        *(() if on_gpu else ON_CPU),
        f"model={figure.model if on_gpu else 'tiny-llama'}",
        f"training.sequence_length={figure.length if on_gpu else 64}",
        f"training.micro_batch_size={figure.micro_batch if on_gpu else 2}",
        f"training.steps={figure.steps}",
        f"hardware.devices_per_node={count}",
        *ALWAYS,
        *(() if "data=preferences" in options else ("data.max_bytes=4000000",)),
        *options,
    ]


def write_pairs(path: Path) -> None:
    """Write preference data: questions, each with a right and a wrong answer."""
    lines = [
        {"prompt": f"{n} + {n} = ", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"}
        for n in range(PAIRS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_tests() -> Tests:
    """Run every test marked `gpu`; without a GPU all of them skip."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Only the files that have such tests: the others import what a lent machine may lack.
        files = [
            str(file)
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if "mark.gpu" in file.read_text(encoding="utf-8")
        ]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        command += files
        subprocess.run(command, cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    kinds = {case: {child.tag for child in case} for case in cases}
    failed = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case, tags in kinds.items()
        if tags & {"failure", "error"}
    )
    skipped = sum("skipped" in tags for tags in kinds.values())
    return Tests(passed=len(cases) - len(failed) - skipped, skipped=skipped, failed=failed)


def render(results: dict[str, dict[str, Any]], *, device: str, on_gpu: bool) -> str:
    """Return the page as Markdown."""
    lines = [f"# {device}", "Written by `scripts/gpu_check.py`.", ""]
    if not on_gpu:
        lines += [
            "**No GPU here.** A model of a few megabytes on a CPU shows that the check runs "
            "through, and nothing about speed: starting and waiting outweigh the arithmetic.",
            "",
        ]
    if tests := results.get(TESTS):
        outcome = f"{tests['passed']} passed, {tests['skipped']} skipped"
        lines.append(f"Tests marked `gpu`: {outcome}, {len(tests['failed'])} failed.")
        lines += [*(f"- {name}" for name in tests["failed"]), ""]
    figures = [figure for figure in FIGURES if figure.name in results]
    for title, kept in (
        ("Speed", [figure for figure in figures if figure.is_of_speed]),
        ("Memory", [figure for figure in figures if not figure.is_of_speed]),
    ):
        if kept:
            rows = [Row(**row) for figure in kept for row in results[figure.name]["rows"]]
            lines += [f"## {title}", table(rows), ""]
    lines += [
        "*trainctl is*: its tokens/s over the row's. *predicted*: the plan's tokens/s. *peak*: "
        "tensors at their most, and what the driver counts outside the allocator; on a CPU the "
        "process. *planned*: the memory budget, and its range. MFU: "
        "[throughput](../throughput.md). Each loop ran in processes of its own, one after the "
        "other, with the same model, batch and DeepSpeed JSON:",
        "",
        *(_line(results[figure.name]) for figure in figures),
    ]
    return "\n".join(lines) + "\n"


def _line(figure: dict[str, Any]) -> str:
    words = " ".join(word for word in figure["overrides"] if word not in ALWAYS)
    packages = ", ".join(f"{name} {release}" for name, release in figure["versions"].items())
    devices = figure["devices"]
    return f"- {figure['name']}: `{words}`; {figure['date']}, {devices} devices, {packages}"


def _is_broken(figure: dict[str, Any]) -> bool:
    rows = figure.get("rows", ())
    return bool(figure.get("failed")) or any(
        row["problem"] for row in rows if row["loop"] == "trainctl"
    )


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    lines: Iterable[dict[str, Any]] = map(json.loads, path.read_text().splitlines())
    return {line["name"]: line for line in lines if line["name"] in NAMES}


def _write(path: Path, text: str) -> None:
    """Write the file by an atomic rename."""
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _version(name: str) -> str:
    if name == "trainctl":  # which may not be installed
        return trainctl.__version__
    try:
        return version(name)
    except ImportError:
        return "absent"


if __name__ == "__main__":
    sys.exit(main())
