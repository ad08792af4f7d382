"""The page of two real runs in a real browser, from disk, with nothing to be had from a network.

One of them had a rank killed and started again, and went back over a spike of its gradient.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import Browser, browser
from commands import TINY, finish, live_processes, start, trainctl
from made_runs import new_run
from selenium.webdriver.common.keys import Keys

from trainctl.runs.records import read_events
from trainctl.train.callbacks.trace_summary import read_trace, render, summarize

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded")]

STEPS = 40
LENGTH = (
    *TINY,
    f"training.steps={STEPS}",
    "training.evaluate_every_steps=10",
    "checkpoint.every_steps=8",
    "logging.memory_phases=true",
    "callbacks=[layer_statistics]",
    "callbacks.layer_statistics.every_steps=4",
)
SPIKES = (
    "stability=rewind",
    "stability.spike_factor=null",
    "stability.norm_spike_factor=1.1",
    "stability.spike_after_steps=10",
    "stability.max_interventions=100",
    "launcher.max_restarts=1",
)
READY = "return document.documentElement.dataset.ready !== undefined"
CHARTS = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "memory", "parts")
"""Charts of a run on CPUs."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, preloaded: None) -> list[Path]:
    """Folders of the two trained runs."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("spikes", "calm")
    one = start("launch", *LENGTH, *SPIKES, "--run-dir", names[0], cwd=folder)
    try:
        _kill_a_rank(folder / names[0])
        code, out, err = finish(one)
    finally:
        one.kill()
    assert code == 0, out + err
    trainctl("launch", *LENGTH, "optimizer.lr=1e-3", "--run-dir", names[1], cwd=folder)
    return [folder / name for name in names]


def _kill_a_rank(run: Path) -> None:
    """Once it has a checkpoint to go back to, and steps to lose."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        steps = [event["step"] for event in read_events(run / "events.jsonl", "step")]
        saved = [event["step"] for event in read_events(run / "events.jsonl", "checkpoint")]
        if saved and steps and steps[-1] > saved[-1]:
            ranks = [
                pid
                for pid in live_processes(run)
                if b"trainctl.train\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            os.kill(max(ranks), signal.SIGKILL)
            return
        time.sleep(0.05)
    raise AssertionError("it never came to a checkpoint")


@pytest.fixture(scope="module")
def file(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    trainctl("report", *map(str, runs), "-o", "page.html", "--price", "2", cwd=folder)
    return folder / "page.html"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(window: Browser, file: Path) -> Browser:
    """Browser that has just opened the page."""
    window.emulate(prefers_color_scheme="light")
    window.resize(1280, 900)
    window.console(), window.requests()
    window.open(file.as_uri(), ready=READY)
    return window


def test_a_profile_is_text_of_the_page(tmp_path: Path, window: Browser) -> None:
    """A model's code may name what it records as it likes."""
    with torch.profiler.profile() as recorded, torch.profiler.record_function("<img src=x>"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    text = render(summarize(read_trace(tmp_path / "trace.json"), 1))
    run = new_run(tmp_path / "run")
    trainctl("report", "run", "-o", "without.html", cwd=tmp_path)
    run.attempt(1).profile.mkdir()
    (run.attempt(1).profile / "rank-0.txt").write_text(f"{text}<img src=x>\n")
    trainctl("report", "run", "-o", "with.html", cwd=tmp_path)
    for name, shown in (("without", None), ("with", f"{text}<img src=x>\n")):
        window.open((tmp_path / f"{name}.html").as_uri(), ready=READY)
        found = window.script("return document.querySelector('#profiles pre')?.textContent ?? null")
        assert found == shown
    assert "aten::mm" in text
    assert window.script("return document.querySelectorAll('#profiles img').length") == 0
    window.script("document.querySelector('#profiles summary').click()")
    assert window.faults() == []


IDLE = "return document.documentElement.dataset.busy === undefined"


def _canvas(page: Browser, chart: str) -> np.ndarray:
    page.wait(IDLE)
    return page.pixels(page.script(f"return document.querySelector('#chart-{chart} canvas')"))


def _colour(page: Browser, variable: str) -> np.ndarray:
    style = "getComputedStyle(document.documentElement)"
    text = page.script(f"return {style}.getPropertyValue(arguments[0]).trim()", variable)
    return np.array([int(text[at : at + 2], 16) for at in (1, 3, 5)])


def _drawn(pixels: np.ndarray, colour: np.ndarray) -> int:
    """Count the pixels of a colour."""
    near = np.abs(pixels[..., :3].astype(int) - colour).max(axis=-1) < 12
    return int((near & (pixels[..., 3] > 200)).sum())


def _shown(page: Browser, chart: str = "loss") -> str:
    page.wait(IDLE)
    return page.script(f"return document.querySelector('#chart-{chart} [role=img]').ariaLabel")


def test_every_curve_is_drawn_without_network_requests(page: Browser, file: Path) -> None:
    assert page.script("return trainctl !== undefined")
    for chart in CHARTS:
        pixels = _canvas(page, chart)
        if chart == "parts":
            assert _drawn(pixels, _colour(page, "--part-1")) > 500
            continue
        for run in ("--run-0", "--run-1"):  # of memory they use the same: one hides the other
            drawn = _drawn(pixels, _colour(page, run))
            assert drawn > 100 or (chart, run) == ("memory", "--run-0"), (chart, run)
    layers = _canvas(page, "layer_statistics-layers-update_ratio")
    assert all(_drawn(layers, _colour(page, f"--part-{layer}")) > 50 for layer in range(2))
    assert [each for each in page.requests() if not each.startswith(("data:", "blob:"))] == [
        file.as_uri()
    ]
    assert page.console() == []


def test_what_the_lines_of_the_budget_are_stands_below_the_chart(page: Browser) -> None:
    """Text on the canvas would cover the measured curve."""
    page.script(
        "window.written = []; const its = CanvasRenderingContext2D.prototype, own = its.fillText;"
        "its.fillText = function (text) { written.push(text); own.apply(this, arguments); };"
    )
    page.press("t", "t")  # the dark theme: all is drawn anew
    page.wait("return written.length > 0")
    assert not any("planned" in text for text in page.script("return written"))
    page.press("t")
    card = "document.querySelector('#chart-memory').parentElement"
    key = page.script(f"return {card}.querySelector('.keyline').innerText")
    assert "dashed: planned" in key and "shaded: between its bounds" in key


def test_what_happened_is_marked_and_told(page: Browser, runs: list[Path]) -> None:
    records = runs[0] / "events.jsonl"
    assert any("to_step" in event for event in read_events(records, "intervention"))
    assert len(read_events(records, "restart")) == 1
    text = page.script("return document.querySelector('#happened').innerText")
    for word in ("failure", "restart 1 of 1 from step", "rewind to step", "SIGKILL"):
        assert word in text
    before = _canvas(page, "grad_norm")
    for kind, colour in (("failure", "--bad"), ("intervention", "--warn"), ("restart", "--accent")):
        assert _drawn(before[: before.shape[0] // 8], _colour(page, colour)) > 5, kind
    page.script("document.querySelector('[data-kind=failure]').click()")
    after = _canvas(page, "grad_norm")
    top = slice(before.shape[0] // 8)
    red = _colour(page, "--bad")
    assert _drawn(after[top], red) < _drawn(before[top], red)
    differing = page.script("return document.querySelector('#differences').innerText")
    assert "optimizer.lr" in differing and "stability.on_bad_loss" in differing


def test_keys_move_zoom_and_switch(page: Browser) -> None:
    whole = _shown(page)
    page.script("document.querySelector('#chart-loss').focus()")
    outline = page.script("return getComputedStyle(document.activeElement).outlineStyle")
    page.press(Keys.ARROW_LEFT)
    assert f"step {STEPS}" in page.script("return document.querySelector('#spoken').textContent")
    assert outline != "none" or page.script(
        "return document.activeElement.matches(':focus-visible')"
    )
    page.press("+", "+")
    zoomed = _shown(page)
    assert zoomed != whole and f"to {STEPS}." in zoomed
    ranges = _shown(page, "grad_norm")
    assert ranges.split(".")[0].endswith(zoomed.split(".")[0].split("from")[1])
    assert page.script("return document.activeElement.id") == "chart-loss"
    page.press(Keys.ESCAPE)
    assert _shown(page) == whole
    # A run is hidden by its number, and by its button.
    hidden = _colour(page, "--run-1")
    page.press("2")
    assert _drawn(_canvas(page, "loss"), hidden) == 0
    page.script("document.querySelectorAll('[data-run]')[1].focus()")
    page.press(Keys.SPACE)
    assert _drawn(_canvas(page, "loss"), hidden) > 100
    page.script("document.querySelector('#chart-loss').focus()")
    before = _canvas(page, "loss")
    page.press("l")
    assert not np.array_equal(before, _canvas(page, "loss"))
    page.press("f")
    assert (
        page.script("return [...document.querySelectorAll('.card button')][1].ariaPressed")
        == "true"
    )
    assert page.console() == []


def test_the_theme_by_key(page: Browser) -> None:
    light = page.script("return getComputedStyle(document.body).backgroundColor")
    page.press("t", "t")
    assert page.script("return document.documentElement.dataset.theme") == "dark"
    assert page.script("return getComputedStyle(document.body).backgroundColor") != light
    assert _drawn(_canvas(page, "loss"), _colour(page, "--run-0")) > 100
    page.press("t")
    page.emulate(prefers_color_scheme="dark")
    page.wait("return document.documentElement.dataset.theme === 'dark'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_fault_of_accessibility(page: Browser, scheme: str) -> None:
    page.emulate(prefers_color_scheme=scheme)
    page.wait(f"return document.documentElement.dataset.theme === '{scheme}'")
    page.script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.faults() == []


def test_narrow_and_printed(page: Browser) -> None:
    page.resize(390, 800)
    page.wait("return document.documentElement.scrollWidth <= 390")
    page.resize(1280, 900)
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 50_000
    assert page.script("return document.body.style.width") == ""
    assert page.console() == []
