"""Report page of a long run: time and memory to build it, its size, and its speed in a browser.

    python scripts/benchmarks/report.py [--steps 1000000] [--tensorboard] [--folder DIR]

The run is generated: records as ranks write them, with noise, spikes, evaluations, checkpoints and
ten rewinds. Chromium (Debian's, without a window or a GPU) opens the page from disk; then it is
zoomed and panned for some seconds, one zoom per frame. With `--tensorboard`, TensorBoard gets the
same numbers by `trainctl runs sync`, and its page is opened in the same browser.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from browser import Browser, browser
from made_runs import START, append, new_run, other, step

from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import last_step
from trainctl.runs.records import record_files

REWINDS = 10
EVALUATIONS, CHECKPOINTS = 2000, 500
"""Numbers in the whole run."""
KEYS = ("training.global_batch_size=32",)
ZOOM_SECONDS = 4.0
PATIENCE_SECONDS = 900.0

MARK_FIRST_CURVE = """
new MutationObserver((_, observer) => {
  if (document.documentElement.dataset.ready === undefined) return;
  observer.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => { window.first = performance.now(); }));
}).observe(document, { attributes: true, subtree: true });
"""
ZOOM = """
const [seconds, done] = [arguments[0], arguments[1]];
const chart = document.querySelector("#chart-loss");
const keys = ["+", "+", "+", "ArrowLeft", "+", "ArrowRight", "-", "-", "ArrowLeft", "-", "-"];
const frames = [];
let last = performance.now(), begin = last, at = 0;
const frame = (now) => {
  frames.push(now - last);
  last = now;
  if (now - begin > 1000 * seconds) return done(frames.slice(2));
  const key = keys[at++ % keys.length];
  const pressed = { key, shiftKey: key.startsWith("A"), bubbles: true };
  chart.dispatchEvent(new KeyboardEvent("keydown", pressed));
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""


def records(steps: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a run with that many steps after rewinds."""
    chance = random.Random(0)
    time_of, number = START, 0
    backs = {round(steps * (at + 1) / (REWINDS + 1)) for at in range(REWINDS)}
    yield other("launch", host="a", pid=1, ranks=8)
    while number < steps:
        number += 1
        time_of += 0.5
        loss = 1.8 + 8 * (number + 50) ** -0.35 + chance.gauss(0, 0.06)
        norm = math.exp(chance.gauss(-0.7, 0.3))
        if chance.random() < 2e-5:
            loss, norm = loss + 3, norm * 30
        parts = {
            "total": 0.5 + abs(chance.gauss(0, 0.02)),
            "data": abs(chance.gauss(0, 0.002)),
            "forward": 0.14 + abs(chance.gauss(0, 0.005)),
            "backward": 0.28 + abs(chance.gauss(0, 0.008)),
            "optimizer": 0.03 + abs(chance.gauss(0, 0.001)),
        }
        yield step(
            number,
            time=time_of,
            loss=loss,
            grad_norm=norm,
            grad_norms={"decayed": norm, "undecayed": norm / 3},
            learning_rate=3e-4 * (0.1 + 0.45 * (1 + math.cos(math.pi * number / steps))),
            tokens=number * 524_288,
            tokens_per_second=524_288 / parts["total"],
            mfu=0.21 / parts["total"],
            seconds=parts,
            peak_bytes={"allocated": 60 << 30, "host": 20 << 30},
        )
        if number % max(1, steps // EVALUATIONS) == 0:
            yield other("evaluation", time=time_of, step=number, loss=loss + 0.05)
        if number % max(1, steps // CHECKPOINTS) == 0:
            path = f"checkpoints/step-{number:08}"
            yield other("checkpoint", time=time_of, step=number, path=path, seconds=9.0)
        if number in backs:
            backs.remove(number)
            to = max(0, number - steps // 400)
            trouble = {"kind": "loss_spike", "value": loss, "limit": 3.0, "policy": "rewind"}
            place = {"samples": [number, number + 1], "ranks": [], "to_step": to}
            yield other("intervention", time=time_of, step=number, **trouble, **place)
            number = to


def make(folder: Path, steps: int) -> RunPaths:
    """Create the run, with its records in the format of ranks."""
    run = new_run(folder / "run", *KEYS, f"training.steps={steps}", devices=8)
    append(run, records(steps))
    return run


def trainctl(*arguments: str) -> dict[str, float]:
    """Run trainctl; return wall and CPU seconds, and its peak memory in MiB."""
    started, before = time.monotonic(), os.times()
    process = subprocess.Popen([sys.executable, "-m", "trainctl", *arguments])
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, arguments
    after = os.times()
    cpu = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    wall = time.monotonic() - started
    return {"wall_s": wall, "cpu_s": cpu, "peak_mib": peak_mib(used)}


def peak_mib(used: resource.struct_rusage) -> float:
    """Return the peak memory of a process; Linux reports KiB."""
    return used.ru_maxrss / 1024


def look(window: Browser, file: Path) -> dict[str, float]:
    """Open the page, then zoom and pan it."""
    tell_browser = window.driver.execute_cdp_cmd
    tell_browser("Page.addScriptToEvaluateOnNewDocument", {"source": MARK_FIRST_CURVE})
    tell_browser("Performance.enable", {"timeDomain": "threadTicks"})
    window.open(file.as_uri(), ready="return window.first")
    first, opened = float(window.script("return window.first")), busy_ms(window)
    window.driver.set_script_timeout(ZOOM_SECONDS * 10)
    frames = window.driver.execute_async_script(ZOOM, ZOOM_SECONDS)
    return {
        "first_curve_ms": first,
        "first_curve_cpu_ms": opened,
        "frames_per_second": 1000 / statistics.mean(frames),
        "slowest_frame_ms": max(frames),
        "cpu_of_a_frame_ms": (busy_ms(window) - opened) / len(frames),
    }


def busy_ms(window: Browser) -> float:
    """Return the CPU time of the page's main thread, which other processes do not affect."""
    metrics = window.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return 1000 * next(each["value"] for each in metrics if each["name"] == "TaskDuration")


def tensorboard(window: Browser, run: RunPaths) -> dict[str, float]:
    """Measure the time until TensorBoard's files are written, its server has read them, and its
    page shows a curve.
    """
    sent = trainctl("runs", "sync", str(run.root), "--to", "tensorboard")
    files = sum(path.stat().st_size for path in (run.root / "tensorboard").rglob("*tfevents*"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "tensorboard.main", "--logdir", str(run.root / "tensorboard")),
        *("--host", "127.0.0.1", "--port", str(port), "--reload_interval", "1"),
    ]
    started = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/"
        last = last_step(run)
        while served_step(url) < last * 0.995:
            if time.monotonic() - started > PATIENCE_SECONDS:
                raise TimeoutError("TensorBoard has not read its files")
            time.sleep(0.5)
        read = time.monotonic() - started
        opened = time.monotonic()
        window.driver.get(url + "#timeseries")
        window.wait(
            "const all = (root) => [...root.querySelectorAll('*')].flatMap((each) =>"
            " [each, ...(each.shadowRoot ? all(each.shadowRoot) : [])]);"
            "return all(document).some((each) => each.localName === 'line-chart'"
            " && each.querySelector('canvas, path'))"
        )
        shown = time.monotonic() - opened
    finally:
        server.terminate()
        server.wait()
    return {
        "sync_cpu_s": sent["cpu_s"],
        "files_mb": files / 1e6,
        "server_reads_s": read,
        "first_curve_ms": shown * 1000,
    }


def served_step(url: str) -> int:
    """Return the last step of the loss that the server has; 0 while it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}data/plugin/scalars/tags", timeout=5) as answer:
            runs = json.loads(answer.read())
        run = next(iter(runs))
        query = f"data/plugin/scalars/scalars?run={run}&tag=train%2Floss"
        with urllib.request.urlopen(url + query, timeout=60) as answer:
            points = json.loads(answer.read())
        return int(points[-1][1])
    except (OSError, ValueError, StopIteration, IndexError):
        return 0


def main() -> None:
    """Measure, and print a line of JSON for each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--folder", type=Path, help="folder of the run, reused if it exists")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = RunPaths(folder / "run")
        if not run.events.exists():
            run = make(folder, given.steps)
        size = sum(file.stat().st_size for file in record_files(run.events))
        tell("run", {"steps": given.steps, "records_mb": size / 1e6})
        file = folder / "report.html"
        usage = trainctl("report", str(run.root), "-o", str(file))
        tell("report", {**usage, "file_mb": file.stat().st_size / 1e6})
        with browser() as window:
            capabilities = window.driver.capabilities
            tell("chromium", {"version": capabilities["browserVersion"], **look(window, file)})
            if given.tensorboard:
                tell("tensorboard", {"version": version("tensorboard"), **tensorboard(window, run)})


def tell(what: str, numbers: dict[str, Any]) -> None:
    """Print one line of JSON."""
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in numbers.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


if __name__ == "__main__":
    main()
