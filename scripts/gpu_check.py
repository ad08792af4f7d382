"""On a machine with a GPU: run every `gpu` test, and measure trainctl against its peers.

    python scripts/gpu_check.py [--model llama-1b] [--devices N] [--cases NAME,...] [--repeats 3]
                                [--without-tests] [--out FOLDER]

Each configuration is launched with trainctl, and then the same model, batch and DeepSpeed JSON are
trained by a bare DeepSpeed loop and by transformers' Trainer, each in processes of its own, one
after the other on the same devices. The page and the CSV go to `docs/benchmarks/gpu-DEVICE.*`.

Without a GPU everything runs at a small size, to see that it does; such figures are only written
where `--out` says.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.comparison import Row, as_csv, measure, table

from trainctl.hardware.detect import visible_devices

ROOT = Path(__file__).resolve().parent.parent

CASES: dict[str, tuple[str, ...]] = {
    "zero1": ("zero_stage=1",),
    "zero1-checkpointing": ("zero_stage=1", "activation_checkpointing=full"),
    "zero3": ("zero_stage=3",),
    "zero3-checkpointing": ("zero_stage=3", "activation_checkpointing=full"),
    "zero3-offload": ("zero_stage=3", "activation_checkpointing=full", "offload=cpu"),
}
"""Configurations, in bf16 on a GPU."""

ALWAYS = (
    "schedule=constant",
    "schedule.warmup_steps=0",
    "training.evaluation_samples=0",
    "training.sample_tokens=0",
    "checkpoint.every_steps=null",
    "checkpoint.every_minutes=null",
    "checkpoint.at_end=false",
)
ON_GPU = (
    "precision=bf16",
    "training.sequence_length=2048",
    "training.micro_batch_size=4",
    "training.gradient_accumulation_steps=2",
)
ON_CPU = (
    "precision=fp32",  # many processors multiply bf16 number by number
    "hardware=cpu",
    "model=tiny-llama",
    "training.sequence_length=64",
    "training.micro_batch_size=2",
    "training.gradient_accumulation_steps=2",
    "data.max_bytes=1000000",
)


@dataclass(frozen=True, kw_only=True)
class Tests:
    """Outcome of the tests marked `gpu`."""

    passed: int
    skipped: int
    failed: tuple[str, ...]


def main() -> int:
    """Run tests and table, write them; exit code 1 if a test or a launch of trainctl failed."""
    arguments = _arguments()
    devices = visible_devices()
    on_gpu = bool(devices)
    device = devices[0].name if on_gpu else f"CPU ({platform.machine()})"
    count = arguments.devices or (len(devices) or 1)
    tests = None if arguments.without_tests else run_tests()
    rows: list[Row] = []
    for name in arguments.cases:
        overrides = [
            *_size(on_gpu, arguments.model),
            *ALWAYS,
            *CASES[name],
            f"hardware.devices_per_node={count}",
            f"training.steps={arguments.steps}",
        ]
        measured = list(
            measure(name, overrides, warmup=arguments.warmup, repeats=arguments.repeats)
        )
        print(table(measured), flush=True)
        rows += measured
    page = render(rows, tests, device=device, count=count, on_gpu=on_gpu, arguments=arguments)
    folder = arguments.out or (ROOT / "docs" / "benchmarks" if on_gpu else None)
    if folder is None:
        print(page)
        print("no GPU: nothing is written without --out", file=sys.stderr)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        name = "gpu-" + device.lower().replace(" ", "-") if on_gpu else "cpu-small"
        (folder / f"{name}.md").write_text(page, encoding="utf-8")
        (folder / f"{name}.csv").write_text(as_csv(rows), encoding="utf-8")
        print(f"written: {folder / name}.md and .csv")
    broken = [row for row in rows if row.loop == "trainctl" and row.problem]
    return int(bool(broken) or bool(tests and tests.failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-1b", help="option of model, on a GPU")
    parser.add_argument("--devices", type=int, help="devices to use; all of them by default")
    parser.add_argument(
        "--cases", type=_cases, default=list(CASES), help=f"of {', '.join(CASES)}; commas between"
    )
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each loop")
    parser.add_argument("--warmup", type=int, default=6, help="of these not measured")
    parser.add_argument("--repeats", type=int, default=1, help="the median is taken")
    parser.add_argument("--without-tests", action="store_true", help="only the table")
    parser.add_argument("--out", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    if not 0 < arguments.warmup < arguments.steps:
        parser.error("--warmup must be at least 1 and below --steps")
    return arguments


def _cases(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"no such case: {', '.join(unknown)}")
    return names


def run_tests() -> Tests:
    """Every test that carries the mark `gpu`; without a GPU all of them skip."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
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


def render(
    rows: list[Row],
    tests: Tests | None,
    *,
    device: str,
    count: int,
    on_gpu: bool,
    arguments: argparse.Namespace,
) -> str:
    """The page."""
    names = ("trainctl", "torch", "deepspeed", "transformers", "accelerate")
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    size = _size(on_gpu, arguments.model)
    lines = [
        f"# {count} x {device}",
        f"Written by `scripts/gpu_check.py` on {datetime.now(UTC):%Y-%m-%d}.",
        f"Python {platform.python_version()}, {versions}.",
        "",
    ]
    if not on_gpu:
        lines += [
            "**No GPU here.** A model of a few megabytes on a CPU shows that the check runs "
            "through, and nothing about speed: starting and waiting outweigh the arithmetic.",
            "",
        ]
    if tests is not None:
        outcome = f"{tests.passed} passed, {tests.skipped} skipped, {len(tests.failed)} failed"
        lines += [f"Tests marked `gpu`: {outcome}.", *(f"- {name}" for name in tests.failed), ""]
    lines += [
        table(rows),
        "",
        f"Each loop: {arguments.steps} optimizer steps, the last "
        f"{arguments.steps - arguments.warmup} measured, in processes of its own; the median of "
        f"{arguments.repeats}. The same model, batch and DeepSpeed JSON: "
        f"`{' '.join([*size, *ALWAYS])}`; of the configuration:",
        "",
        *(f"- {name}: `{' '.join(CASES[name])}`" for name in arguments.cases),
        "",
        "*trainctl is*: its tokens/s over the row's. *peak*: tensors at their most, and what the "
        "driver counts outside the allocator; on a CPU the process. *planned*: the memory budget, "
        "and its range. MFU: [throughput](../throughput.md).",
    ]
    return "\n".join(lines) + "\n"


def _size(on_gpu: bool, model: str) -> tuple[str, ...]:
    return (f"model={model}", *ON_GPU) if on_gpu else ON_CPU


def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return "absent"


if __name__ == "__main__":
    sys.exit(main())
