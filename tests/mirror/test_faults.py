"""A store that is full, refuses, lies or hangs changes nothing for the run, and status says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from supervised import Launches

from trainctl.config.schema import CheckpointConfig
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.listing import status_of
from trainctl.runs.mirror_state import read_mirror_state
from trainctl.runs.status import Request, State, file_request

pytestmark = pytest.mark.slow

URL = "s3://bucket/runs/a"
SAID = {
    "full": "StorageFull",
    "refuses": "PermissionError",
    "drops": "does not hold what it confirmed",
}
_ERROR = "<Error><Code>{}</Code><Message>{}</Message></Error>"
_EMPTY = (
    "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
)


class FaultyServer(ThreadingHTTPServer):
    """S3 server that holds nothing and misbehaves in the way of `fault`."""

    daemon_threads = True
    fault = "full"
    ends = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def answer(self) -> None:
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault, is_write = self.server.fault, self.command == "PUT"
        if fault == "hangs":
            self.server.ends.wait()
        elif fault == "refuses":
            self._send(403, _ERROR.format("AccessDenied", "no"))
        elif is_write:
            self._send(
                *((200, "") if fault == "drops" else (507, _ERROR.format("StorageFull", fault)))
            )
        elif "list-type" in self.path:
            self._send(200, _EMPTY)
        else:
            self._send(404, _ERROR.format("NoSuchKey", "none"))

    do_GET = do_HEAD = do_PUT = do_DELETE = answer

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with FaultyServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-written")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        yield server
        server.ends.set()
        server.shutdown()


def test_a_faulty_store_changes_nothing_for_the_run(tmp_path, server):
    launches = Launches(tmp_path)
    try:
        run = launches.make_run(checkpoint=CheckpointConfig(keep=1, mirror=URL))
        launch = launches.start("forever,saves,obliging", run=run)
        for fault, said in SAID.items():
            server.fault = fault
            launch.wait_for(lambda said=said: said in read_mirror_state(run).problem)
        launch.wait_for(lambda: launch.events("mirror"))
        server.fault = "hangs"
        before, began = len(launch.events("step")), time.monotonic()
        launch.wait_for(lambda: len(launch.events("step")) >= before + 30)
        assert time.monotonic() - began < 20, "a step takes 50 ms, and a request of the store 60 s"
        status = status_of(run)
        assert status.mirror["step"] is None and len(status.mirror["waiting"]) == 1
        assert status.mirror["problem"]
        # The newest, and one more that the store lacks.
        launch.wait_for(lambda: len(list_checkpoints(run)) == 2)
        file_request(run, Request.stop)
        ended = time.monotonic()
        code, _ = launch.end()
        assert code == 0 and launch.status().state is State.stopped
        assert time.monotonic() - ended < 20
    finally:
        launches.close()
    written = [path for path in run.root.rglob("*") if path.is_file()]
    assert not any(b"not-to-be-written" in path.read_bytes() for path in written)
