"""Tests of the answers of the `trainctl watch` server, and of who gets them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_runs import make_run, train

from trainctl.cli.main import run as command
from trainctl.monitor.report import runs_folder as folders
from trainctl.monitor.report.runs_folder import RunsFolder
from trainctl.monitor.report.watching import MOST_THREADS, PageServer, RunsPage, WatchApp
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.records import EventWriter
from trainctl.runs.status import State, Status, write_status

RATES = ("1e-3", "3e-3", "1e-2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunPaths]:
    root = tmp_path_factory.mktemp("runs")
    made = [make_run(root / f"run {rate}&", f"optimizer.lr={rate}") for rate in RATES]
    for run, loss in zip(made, (3.0, 2.0, float("nan")), strict=True):
        train(run, range(1, 4), loss)
        with EventWriter(run.events, 1) as events:
            events.write("evaluation", step=3, loss=loss)
    (root / "secret.txt").write_text("nobody's")
    return made


class Client:
    """Asks a server."""

    def __init__(self, server: PageServer) -> None:
        self.server = server
        self.port = server.server_address[1]
        self.headers = {"Authorization": f"Bearer {server.token}"}

    def ask(
        self, path: str, method: str = "GET", *, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body=body, headers=named or self.headers)
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def json(self, path: str) -> dict:  # type: ignore[type-arg]
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)  # type: ignore[no-any-return]


def serving(watching: WatchApp) -> Iterator[Client]:
    with PageServer("127.0.0.1", 0, watching.respond, names=("proxy.example",)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield Client(server)
        server.shutdown()
        thread.join()


@pytest.fixture
def one(runs: list[RunPaths]) -> Iterator[Client]:
    yield from serving(WatchApp(runs[:1]))


@pytest.fixture
def folder(runs: list[RunPaths]) -> Iterator[Client]:
    yield from serving(WatchApp(folder=runs[0].root.parent))


def test_only_who_knows_the_token_is_answered(one: Client) -> None:
    token, cookie = one.server.token, one.server.cookie
    assert len(token) >= 32 and one.server.url.endswith(f"/?token={token}")
    for headers in (
        {"Accept": "*/*"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {token[:-1]}"},
        {"Authorization": f"Basic {token}"},
        {"Cookie": f"{cookie}={token}x"},
        {"Cookie": f"other={token}"},
        {"Cookie": 'a="; b'},
        {"Cookie": f"{cookie}"},
    ):
        for path in ("/", "/data.json", "/?token=", "/?token=wrong", "/nothing"):
            status, _, body = one.ask(path, **headers)
            assert status == 403 and b"token" in body and token.encode() not in body
    others = 'a={"b": 1}; c d=[]; e=2|1:0'  # of servers on other ports
    for headers in ({"Cookie": f"{others}; {cookie}={token}"}, one.headers):
        assert one.ask("/", **headers)[0] == 200
    status, found, body = one.ask(f"/?token={token}", Accept="*/*")
    assert (status, found["Location"], body) == (303, "/", b"")
    assert found["Set-Cookie"] == f"{cookie}={token}; Path=/; HttpOnly; SameSite=Lax"
    outside = one.ask(f"//elsewhere.example/?token={token}", Accept="*/*")[1]["Location"]
    assert outside == "/elsewhere.example/", "never another server"
    # To a browser a backslash is a slash.
    for path in (r"/\evil.example/", r"/\/evil.example/", r"//\evil.example/", r"\\evil.example/"):
        assert one.ask(f"{path}?token={token}", Accept="*/*")[1]["Location"] == "/"
    asked = one.ask(rf"/runs/a%20b\c/?token={token}", Accept="*/*")[1]["Location"]
    assert asked == "/runs/a%20b%5Cc/"


def test_a_name_that_another_site_gave_this_address_is_refused(one: Client) -> None:
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "a b",
        "[",
    ):
        assert one.ask("/", **one.headers, Host=host)[0] == 421, host
    for host in ("localhost:9", "127.0.0.1", "[::1]:80", "10.1.2.3", socket.gethostname().upper(),
                 "proxy.example:8443"):  # fmt: skip
        assert one.ask("/", **one.headers, Host=host)[0] == 200, host


def test_nothing_else_is_served(folder: Client, runs: list[RunPaths]) -> None:
    names = ("secret.txt", "../secret.txt", "run.json", "events.jsonl", "%2e%2e/secret.txt")
    known = folder.json("/runs.json")["runs"][0]["id"]
    for name in (*names, "run/", f"run/{known}", f"run/{known}/../..", f"run/{known}/run.json",
                 "run/../", "run//", f"run/{known},zz/", "run/%00/", "data.json"):  # fmt: skip
        status, _, body = folder.ask(f"/{name}")
        assert status == 404 and b"nobody" not in body, name
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
        status, found, _ = folder.ask("/", method, body=b"{}", **folder.headers)
        assert (status, found["Allow"]) == (405, "GET, HEAD")
    status, found, body = folder.ask("/", "HEAD")
    assert status == 200 and body == b"" and int(found["Content-Length"]) > 1000


def test_every_answer_has_strict_headers(folder: Client) -> None:
    for path in ("/", "/runs.json", "/nothing", "/?token=wrong"):
        _, found, _ = folder.ask(path)
        assert found["X-Content-Type-Options"] == "nosniff" and found["X-Frame-Options"] == "DENY"
        assert found["Cache-Control"] == "no-store" and found["Referrer-Policy"] == "no-referrer"
        assert found["Content-Security-Policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in found["Content-Security-Policy"]
        assert found["Server"].strip() == "trainctl", "no versions"


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\xff" * 70_000]
)
def test_a_malformed_request_does_not_stop_the_server(one: Client, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", one.port), timeout=20) as raw:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass
    assert one.ask("/")[0] == 200


def test_a_body_is_no_next_request(one: Client) -> None:
    head = f"Host: localhost\r\nAuthorization: Bearer {one.server.token}\r\n"
    body = f"GET /nothing HTTP/1.1\r\n{head}\r\n"
    with socket.create_connection(("127.0.0.1", one.port), timeout=30) as raw:
        raw.sendall(f"GET / HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = b""
        try:
            while part := raw.recv(65536):
                answer += part
        except ConnectionResetError:
            pass  # with what was not read in its buffer it closes so
    assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 404" not in answer


def test_a_launcher_that_is_killed_is_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    about = {"attempt": 1, "host": "a", "pid": 1, "started": 1.0, "updated": 2.0, "message": ""}
    write_status(run, Status(state=State.running, **about))
    page = RunsPage([run])
    with hold_lock(run):
        found = json.loads(page.data(None).body)
        assert found["runs"][0]["state"] == "running"
        assert page.data(found["version"]).status == 204
    newer = json.loads(page.data(found["version"]).body)
    assert newer["runs"][0]["state"] == "lost"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [(["--price", "inf"], 2, "inf is no price"), (["--host", "a..b"], 4, "it is no name")],
)
def test_what_cannot_be_served_is_reported(
    words: list[str],
    code: int,
    said: str,
    runs: list[RunPaths],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["watch", str(runs[0].root), *words]) == code
    assert said in capsys.readouterr().err


def test_a_run_that_grows_is_sent_when_it_has(one: Client, runs: list[RunPaths]) -> None:
    found = one.json("/data.json")
    assert found["runs"][0]["step"] == 3
    assert one.ask(f"/data.json?after={found['version']}")[0] == 204
    train(runs[0], range(4, 6))
    newer = one.json(f"/data.json?after={found['version']}")
    assert newer["runs"][0]["step"] == 5 and newer["version"] != found["version"]
    assert one.ask(f"/data.json?after={newer['version']}")[0] == 204


def test_a_run_without_a_step_has_a_page_already(runs: list[RunPaths], tmp_path: Path) -> None:
    run = make_run(tmp_path / "new")
    for client in serving(WatchApp([run])):
        assert client.json("/data.json")["runs"][0]["step"] == 0
        train(run, range(1, 2))
        assert client.json("/data.json")["runs"][0]["step"] == 1


def test_a_bug_is_an_answer_and_ends_nothing(
    one: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(one.server, "respond", lambda path, query: {}["path"])
        status, _, body = one.ask("/")
        assert status == 500 and b"Traceback" not in body
    assert "KeyError" in capsys.readouterr().err
    assert one.ask("/")[0] == 200


def test_a_folder_says_what_differs_and_what_is_best(
    folder: Client, runs: list[RunPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "LEAST_SECONDS", 0.0)
    found = folder.json("/runs.json")
    assert (found["keys"], found["measure"]) == (["optimizer.lr"], "held-out loss")
    rows = {row["name"]: row for row in found["runs"]}
    assert [rows[run.root.name]["values"] for run in runs] == [["0.001"], ["0.003"], ["0.01"]]
    assert [rows[run.root.name]["held_out"] for run in runs] == [3.0, 2.0, None]
    assert rows[runs[2].root.name]["is_finite"] is False
    best = rows[runs[1].root.name]
    assert found["best"] == best["id"]
    both = f"{best['id']},{rows[runs[0].root.name]['id']}"
    shown = folder.json(f"/run/{both}/data.json")
    assert [run["name"] for run in shown["runs"]] == [runs[1].root.name, runs[0].root.name]
    assert folder.ask(f"/runs.json?after={found['version']}")[0] == 204
    with EventWriter(runs[0].events, 1) as events:
        events.write("evaluation", step=9, loss=1.0)
    newer = folder.json(f"/runs.json?after={found['version']}")
    assert newer["best"] == rows[runs[0].root.name]["id"]


def test_only_runs_that_changed_are_looked_at_again(
    runs: list[RunPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    read = folders._read

    def counted(run, values):  # type: ignore[no-untyped-def]
        looked.append(run.root.name)
        return read(run, values)

    monkeypatch.setattr(folders, "_read", counted)
    monkeypatch.setattr(folders, "LEAST_SECONDS", 0.0)
    table = RunsFolder(runs[0].root.parent)
    table.look()
    assert len(looked) == len(runs)
    table.look()
    assert len(looked) == len(runs)
    train(runs[1], range(9, 10))
    table.look()
    assert looked[len(runs) :] == [runs[1].root.name]


def test_idle_connections_drop_no_request(one: Client) -> None:
    idle = [socket.create_connection(("127.0.0.1", one.port)) for _ in range(MOST_THREADS + 8)]
    begin = time.monotonic()
    assert one.ask("/")[0] == 200
    assert time.monotonic() - begin < 15
    for each in idle:
        each.close()


def test_runs_of_other_objectives_are_not_ranked(tmp_path: Path) -> None:
    for name in "abc":
        train(make_run(tmp_path / name), range(1, 3), 2.0)
    found = RunsFolder(tmp_path).look()[1]
    assert found["is_ranked"] and found["best"] is not None
    (plan,) = (tmp_path / "b").glob("attempts/*/plan.json")
    content = json.loads(plan.read_text())
    content["config"]["objective"]["kind"] = "grpo"
    plan.write_text(json.dumps(content))
    found = RunsFolder(tmp_path).look()[1]
    assert not found["is_ranked"] and found["best"] is None
    assert [row["result"] for row in found["runs"]] == [None, None, None]
