"""`trainctl watch` in a real browser: a run that trains meanwhile, and a folder of runs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Browser, browser
from commands import TINY, finish, start
from live_runs import make_run, train

from trainctl.runs.records import EventWriter, read_events

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded")]

READY = "return document.documentElement.dataset.ready !== undefined"
SHOWN = "Number(document.querySelector('#tiles .value').firstChild.textContent.replace(/\\D/g, ''))"
NOTICE = "document.querySelector('#notice').textContent"
MANY = 200


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@contextmanager
def watched(*words: str, cwd: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address that a server prints, and the server, which must exit with 0 on Ctrl-C."""
    server = start("watch", *words, cwd=cwd)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), server
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
        code, out, err = finish(server, timeout=20)
        assert code == 0 and out == "" and "Traceback" not in err, err
    finally:
        server.kill()


def fits_any_window(window: Browser) -> None:
    """Check that nothing is cut off on a laptop or a phone: wide tables scroll within the page."""
    for width in (1300, 390):
        window.resize(width, 800)
        window.wait(f"return document.documentElement.scrollWidth <= {width}")
    window.resize(1280, 900)


def test_a_run_is_watched_while_it_trains(tmp_path: Path, window: Browser) -> None:
    training = start("launch", *TINY, "training.steps=100000", "--run-dir", "run", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not read_events(tmp_path / "run" / "events.jsonl", "step"):
            assert time.monotonic() < deadline and training.poll() is None
            time.sleep(0.1)
        with watched("run", cwd=tmp_path) as (url, server):
            window.open(url, ready=READY)
            address = window.driver.current_url
            assert "token" not in address and window.console() == []
            first = window.wait(f"return {SHOWN}")
            window.wait(f"return {SHOWN} > {first + 4}")
            assert window.driver.current_url == address, "without being loaded again"
            assert window.console() == []
            fits_any_window(window)
            server.send_signal(signal.SIGINT)
            window.wait(f"return {NOTICE}.startsWith('No connection')")
    finally:
        training.send_signal(signal.SIGINT)
        finish(training)


def test_a_folder_of_hundreds_of_runs(tmp_path: Path, window: Browser) -> None:
    for index in range(4):
        run = make_run(tmp_path / "folder" / f"run-{index}", f"optimizer.lr={(index + 1) * 1e-3}")
        train(run, range(1, 5))
        with EventWriter(run.events, 1) as events:
            events.write("evaluation", step=4, loss=3.0 - (index == 2))
    made = list((tmp_path / "folder").iterdir())
    for index in range(MANY - len(made)):
        copied = tmp_path / "folder" / f"copy-{index}"
        subprocess.run(["cp", "-r", str(made[index % 2]), str(copied)], check=True)
    with watched("folder", cwd=tmp_path) as (url, _):
        window.console()  # of the page before, whose server is gone
        begun = time.monotonic()
        window.open(url, ready=READY)
        assert time.monotonic() - begun < 20
        assert window.script("return document.querySelectorAll('tbody tr').length") == MANY
        assert window.script("return document.querySelectorAll('#plot path').length") == MANY
        assert window.script("return document.querySelector('tr.best th a').textContent") == "run-2"
        assert window.script("return document.querySelectorAll('#plot path.best').length") == 1
        window.script("document.querySelector('#filter').focus()")
        window.press(*"run-")
        window.wait("return document.querySelector('#count').textContent === '4 of 200 runs'")
        head = "document.querySelector('[data-column=\"held-out loss\"]')"
        window.script(f"{head}.focus()")
        window.press("\ue007")  # Enter
        names = "return [...document.querySelectorAll('tbody a')].map((each) => each.textContent)"
        assert window.script(names)[0] == "run-2"
        window.press("\ue007")
        assert window.script(names)[-1] == "run-2"
        assert window.script(f"return {head}.parentNode.ariaSort") == "descending"
        assert window.console() == [] and window.faults() == []
        fits_any_window(window)
        box = "document.querySelectorAll('tbody input')"
        window.script(f"{box}[0].click(); {box}[1].click()")
        window.script("document.querySelector('#open').click()")
        window.wait("return location.pathname.startsWith('/run/')")
        window.wait(READY)
        assert window.script("return document.querySelectorAll('.run').length") == 2
        assert window.console() == []
