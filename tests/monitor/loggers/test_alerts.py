"""Alerts: each is told once, by a real server that is slow, refuses or hangs, and over kill -9."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import made_runs
import pytest
from processes import cursor, end, following, send, wait_for

from trainctl.config.schema import AlertsConfig, LoggingConfig, RunConfig
from trainctl.monitor.loggers import alerts
from trainctl.runs.directory import create_run, new_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import is_alive
from trainctl.runs.records import EventWriter
from trainctl.runs.status import State, Status, write_status

CANARY = "canary-5d1e"
URL = "${oc.env:ALERT_URL}"


class Webhook(ThreadingHTTPServer):
    """Answers as `mode` says: a code, or `hang`. Keeps what it answered with 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode: int | str = 200
        self.seconds = 0.0
        self.got: list[dict[str, Any]] = []
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{CANARY}"


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = self.server.mode
        self.server.asked += 1
        if mode == "hang":
            time.sleep(60)
            return
        time.sleep(self.server.seconds)
        if mode == 200:
            self.server.got.append(body)
        self.send_response(int(mode))
        self.send_header("Location", f"/{CANARY}/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def webhook() -> Iterator[Webhook]:
    server = Webhook()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def new_run(folder: Path, **alerts: Any) -> RunPaths:
    alerts = {"urls": [URL], **alerts}
    config = RunConfig(logging=LoggingConfig(to=[], alerts=AlertsConfig(**alerts)))
    return create_run(config, run_dir=folder / "run", folder=folder)


def write(run: RunPaths, *records: tuple[str, dict[str, Any]], attempt: int = 1) -> None:
    with EventWriter(run.events, attempt) as events:
        for kind, fields in records:
            events.write(kind, **fields)


def step(number: int) -> tuple[str, dict[str, Any]]:
    return "step", {"step": number, "loss": 1.0}


def restart(number: int) -> tuple[str, dict[str, Any]]:
    return "restart", {"number": number, "of": 99, "step": 7, "nodes": 1, "cause": "a rank died"}


def ended(run: RunPaths, state: State) -> None:
    about = {"host": "a", "pid": 1, "started": 1.0, "updated": time.time()}
    write_status(run, Status(state=state, attempt=2, message="why", **about))


def test_each_event_is_alerted_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    slow = {"rank": 1, "node": 0, "host": "b", "slow": True, "factor": 2.0, "part": "data",
            "seconds": 2.0, "usual_seconds": 1.0, "step": 8}  # fmt: skip
    spike = {"step": 8, "kind": "loss_spike", "value": 9.0, "limit": 4.0, "ranks": [],
             "samples": [0, 8], "policy": "rewind", "to_step": 4}  # fmt: skip
    diverged = {"diverged": False, "step": 8, "limit": 5.0}
    failure = {"rank": 1, "node": 0, "message": "was killed by SIGKILL"}
    write(run, ("launch", {}), step(7), ("failure", failure), ("failure", {**failure, "rank": 0}))
    write(run, restart(1), ("launch", {}), step(8), ("intervention", spike), attempt=2)
    write(run, ("straggler", slow), ("divergence", diverged), step(9), attempt=2)
    ended(run, State.finished)
    with webhook() as server:
        for _ in range(2):
            assert send(run, "alerts", ALERT_URL=server.url) == (0, "")
        told = [(alert["kind"], alert["text"], alert["step"]) for alert in server.got]
        assert told == [
            ("failure", "run: attempt 1: rank 1 (node 0) was killed by SIGKILL", 7),
            ("restart", "run: restart 1 of 99 from step 7, after: a rank died", 7),
            (
                "spike",
                "run: step 8: loss 9 above 4 (samples 0 to 8): rewind to step 4",
                8,
            ),
            (
                "straggler",
                "run: rank 1 (node 0, b) takes 2.00 times as long as its peers up to step 8, and "
                "all wait for it; most of it in data (its loader): 2 s a step instead of 1 s",
                8,
            ),
            ("spike", "run: the loss has come down: the ten steps up to 8 are below 5", 8),
            ("end", "run: finished at step 9: why", 9),
        ]
        assert len({alert["id"] for alert in server.got}) == 6
        assert {alert["tries"] for alert in server.got} == {1}
    for path in run.root.rglob("*"):
        assert not path.is_file() or CANARY not in path.read_text()


def test_only_requested_alerts_are_sent(tmp_path: Path) -> None:
    from trainctl.config.schema import AlertKind

    run = new_run(tmp_path, kinds=[AlertKind.end])
    write(run, ("launch", {}), step(1), restart(1))
    ended(run, State.failed)
    with webhook() as server:
        assert send(run, "alerts", ALERT_URL=server.url) == (0, "")
        assert [alert["kind"] for alert in server.got] == ["end"]


def test_events_before_alerts_were_configured_are_not_sent(tmp_path: Path) -> None:
    run = made_runs.new_run(tmp_path / "run")
    planned = read_plan(run.attempt(1).plan)
    logging = LoggingConfig(to=[], alerts=AlertsConfig(urls=[URL]))
    new_attempt(run, replace(planned, config=replace(planned.config, logging=logging)))
    failure = {"rank": 1, "node": 0, "message": "was killed by SIGKILL"}
    write(run, step(7), ("failure", failure))
    write(run, step(8), ("failure", failure), attempt=2)
    with webhook() as server:
        assert send(run, "alerts", ALERT_URL=server.url) == (0, "")
        assert [(alert["attempt"], alert["step"]) for alert in server.got] == [(2, 8)]


@pytest.mark.slow
def test_a_failed_receiver_is_retried_and_delays_no_other(tmp_path: Path) -> None:
    run = new_run(tmp_path, urls=[URL, "${oc.env:OTHER_URL}"])
    write(run, ("launch", {}), restart(1))
    with webhook() as server, webhook() as other:
        server.mode = 503
        variables = {"ALERT_URL": server.url, "OTHER_URL": other.url}
        with following(run, "alerts", **variables) as process:
            wait_for(lambda: cursor(run, "alerts")["problem"] == f"{URL}: the server answers 503")
            assert len(other.got) == 1
            server.mode = 200
            wait_for(lambda: server.got)
            assert server.got[0]["tries"] > 1
            wait_for(lambda: cursor(run, "alerts")["problem"] == "")
            server.mode = 404  # nobody wants it: left out at last, and what follows is told
            write(run, restart(2))
            wait_for(lambda: server.asked == 5)
            server.mode = 200
            write(run, restart(3))
            wait_for(lambda: len(server.got) == 2)
            assert end(process) == 0
        assert [alert["text"].split()[2] for alert in server.got] == ["1", "3"]
        assert [alert["text"].split()[2] for alert in other.got] == ["1", "2", "3"]
        write(run, restart(4))
    code, said = send(run, "alerts", **variables)  # nothing listens there any more
    assert code == 4 and cursor(run, "alerts")["problem"].startswith(f"{URL}: Connection refused")
    assert CANARY not in said


def test_a_failing_receiver_does_not_delay_the_final_alert(tmp_path: Path) -> None:
    run = new_run(tmp_path, urls=[URL, "${oc.env:OTHER_URL}"])
    write(run, ("launch", {}), restart(1))
    with webhook() as server, webhook() as other:
        server.mode = 301  # a POST that follows becomes a GET without a body
        variables = {"ALERT_URL": server.url, "OTHER_URL": other.url}
        assert send(run, "alerts", **variables)[0] == 4
        assert cursor(run, "alerts")["problem"] == f"{URL}: the server answers 301"
        ended(run, State.failed)
        assert send(run, "alerts", **variables)[0] == 4
        assert [alert["kind"] for alert in other.got] == ["restart", "end"]
        server.mode = 200
        assert send(run, "alerts", **variables) == (0, "")
        assert [alert["kind"] for alert in server.got] == ["restart", "end"]
        assert len(other.got) == 2


def test_kills_lose_nothing_and_repeat_only_what_was_under_way(tmp_path: Path) -> None:
    run, chance = new_run(tmp_path), random.Random(1)
    write(run, ("launch", {}), *(restart(number) for number in range(20)))
    kills = 0
    with webhook() as server:
        server.seconds = 0.03
        while len({alert["id"] for alert in server.got}) < 20:
            with following(run, "alerts", ALERT_URL=server.url) as process:
                before = len(server.got)
                wait_for(lambda before=before: len(server.got) > before)
                time.sleep(chance.random() * 0.3)
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        assert send(run, "alerts", ALERT_URL=server.url) == (0, "")
        server.mode = "hang"
        write(run, restart(20))
        with following(run, "alerts", ALERT_URL=server.url) as process:
            asked = server.asked
            wait_for(lambda: server.asked > asked)
            os.kill(process.pid, signal.SIGKILL)
        server.mode = 200
        assert send(run, "alerts", ALERT_URL=server.url) == (0, "")
        assert server.got[-1]["tries"] == 2
        numbers = [int(alert["text"].split()[2]) for alert in server.got]
        assert sorted(set(numbers)) == list(range(21)) and numbers == sorted(numbers)
        repeated = [alert for alert in server.got[:-1] if alert["tries"] > 1]
        assert len(repeated) <= kills
        assert len(numbers) - 21 <= len(repeated)


def test_a_program_gets_the_alert_and_no_shell_sees_it(tmp_path: Path) -> None:
    keep = tmp_path / "keep.py"
    keep.write_text(
        "import json, os, sys, time\n"
        "alert = json.load(sys.stdin)\n"
        "open(sys.argv[1], 'a').write(json.dumps([sys.argv[2:], alert['kind']]) + '\\n')\n"
        "if alert['text'].endswith('hang'): open(sys.argv[1] + '.pid', 'w').write(str(os.getpid()))"
        "; time.sleep(60)\n"
    )
    heard = tmp_path / "heard"
    command = [sys.executable, str(keep), str(heard), "$HOME; echo `id`"]
    run = new_run(tmp_path, urls=[], command=command)
    write(run, ("launch", {}), restart(1))
    assert send(run, "alerts") == (0, "")
    assert json.loads(heard.read_text()) == [["$HOME; echo `id`"], "restart"]
    kind, fields = restart(2)
    write(run, (kind, {**fields, "cause": "hang"}))
    pid = tmp_path / "heard.pid"
    with following(run, "alerts") as process:
        wait_for(lambda: pid.exists() and pid.read_text())
        os.kill(process.pid, signal.SIGKILL)
    # Whoever adopted it, this process too, may leave a zombie.
    wait_for(lambda: not is_alive(int(pid.read_text())))


def test_a_stall_is_alerted_once_until_the_run_moves_again(tmp_path: Path) -> None:
    run = new_run(tmp_path, no_progress_minutes=0.02)
    with webhook() as server, following(run, "alerts", ALERT_URL=server.url) as process:
        time.sleep(1.5)
        assert not server.got, "nothing has begun"
        write(run, ("launch", {}), step(1))
        wait_for(lambda: len(server.got) == 1)
        time.sleep(1.5)
        assert server.got[0]["text"] == "run: no step for 0 minutes, the last was 1"
        assert len(server.got) == 1
        write(run, step(2))
        wait_for(lambda: len(server.got) == 2)
        assert end(process) == 0


class _Drips(BaseHTTPRequestHandler):
    """Sends a header line more often than any read times out."""

    def do_POST(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        with suppress(OSError):
            for _ in range(80):
                self.wfile.write(b"X-More: to come\r\n")
                time.sleep(0.1)

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


def test_a_server_that_drips_is_left_after_the_limit_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alerts, "POST_SECONDS", 0.5)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Drips) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setenv("ALERT_URL", f"http://127.0.0.1:{server.server_port}/{CANARY}")
        try:
            began = time.monotonic()
            with pytest.raises(OSError, match=r"it did not answer within 0\.5 s") as caught:
                alerts.post_alert(URL, {"text": "a"})
            assert time.monotonic() - began < 4 and CANARY not in str(caught.value)
        finally:
            server.shutdown()
            thread.join()
