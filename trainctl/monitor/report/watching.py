"""Documents of `trainctl watch`: pages of runs and of folders of runs, made from their files.

The HTTP server knows its few addresses and reads no path from a request, so it cannot give away a
file. A request must know the token: it is in the address that is printed, then in a cookie. The
`Host` of a request must be an IP address or a name of this machine, so that no other site can have
a browser send requests here under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from trainctl.errors import TrainctlError
from trainctl.monitor.report.document import report_document
from trainctl.monitor.report.history import History
from trainctl.monitor.report.page import FOLDER_PAGE, RUNS_PAGE, Page, PageSource
from trainctl.monitor.report.runs_folder import RunsFolder
from trainctl.runs.layout import RunPaths

BUCKETS = 2000
"""Points of each run's curves: about 150 KB per document."""

READING_SECONDS = 1.5
"""Longest time to read records for one answer; the rest of a long run comes with the next answer.
"""
_PIECE_BYTES = 4 << 20

POLL_SECONDS = 2.0
FOLDER_POLL_SECONDS = 4.0

MOST_OPEN = 24
"""Most pages whose runs are kept in memory: the last ones that were looked at."""


class RunsPage:
    """A page of some runs, and its data.

    Args:
        price: Price of one device for an hour.
    """

    def __init__(self, runs: Sequence[RunPaths], price: float | None = None) -> None:
        self._histories = [History(run) for run in runs]
        self._price = price
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None
        self.title = ", ".join(run.root.name for run in runs)

    def html(self) -> Answer:
        """Return the page, which requests its data itself."""
        return Answer.page(RUNS_PAGE, self.title, PageSource("data.json", POLL_SECONDS))

    def data(self, after: str | None) -> Answer:
        """Return the newest document; 204 if its version is `after`."""
        with self._lock:
            self._read()
            version = ".".join(str(history.version) for history in self._histories)
            if after == version:
                return Answer(status=HTTPStatus.NO_CONTENT)
            if self._made is None or self._made[0] != version:
                try:
                    made = report_document(self._histories, price=self._price, most=BUCKETS)
                except TrainctlError as error:
                    return Answer.problem(HTTPStatus.SERVICE_UNAVAILABLE, error.message)
                self._made = (version, _json(made))
            return Answer(self._made[1], "application/json")

    def _read(self) -> None:
        deadline = time.monotonic() + READING_SECONDS
        waiting = list(self._histories)
        while waiting and time.monotonic() < deadline:
            waiting = [history for history in waiting if history.read(_PIECE_BYTES)]


class WatchApp:
    """Site of `trainctl watch`: some runs on one page, or a folder of runs with a page for each.

    Args:
        runs: Runs of the one page; empty serves `folder`.
        folder: Folder of runs, or of a sweep.
        price: Price of one device for an hour.
    """

    def __init__(
        self, runs: Sequence[RunPaths] = (), folder: Path | None = None, price: float | None = None
    ) -> None:
        self._price = price
        self._only = RunsPage(runs, price) if runs else None
        self._folder = RunsFolder(folder) if folder is not None else None
        self._lock = threading.Lock()
        self._open: dict[str, RunsPage] = {}

    def respond(self, path: str, query: Mapping[str, str]) -> Answer | None:
        """Return the document at an address; None if there is none."""
        after = query.get("after")
        if self._only is not None:
            return _of_page(self._only, path.removeprefix("/"), after)
        assert self._folder is not None
        folder = self._folder
        if path == "/":
            source = PageSource("runs.json", FOLDER_POLL_SECONDS)
            return Answer.page(FOLDER_PAGE, folder.root.name, source)
        if path == "/runs.json":
            version, document = folder.look()
            if after == version:
                return Answer(status=HTTPStatus.NO_CONTENT)
            return Answer(_json(document), "application/json")
        parts = path.split("/")  # "", "run", IDS, "" or "data.json"
        if len(parts) != 4 or parts[1] != "run":
            return None
        opened = self._page(parts[2])
        return None if opened is None else _of_page(opened, parts[3], after)

    def _page(self, numbers: str) -> RunsPage | None:
        """Return the page of runs of the folder, by their comma-separated ids."""
        assert self._folder is not None
        with self._lock:
            runs = self._folder.runs_of(numbers)
            if not runs:
                return None
            opened = self._open.pop(numbers, None) or RunsPage(runs, self._price)
            self._open[numbers] = opened  # moved to the end: the most recent one
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return opened


def _of_page(opened: RunsPage, name: str, after: str | None) -> Answer | None:
    """Return the page or its data; None for another name."""
    if name == "":
        return opened.html()
    return opened.data(after) if name == "data.json" else None


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _bytes(text)


def _bytes(text: str) -> bytes:
    """Return UTF-8; bytes of a path that are not UTF-8 become JSON escapes."""
    return text.encode(errors="backslashreplace")


TIMEOUT_SECONDS = 20.0
"""Longest time for receiving a request, and for sending an answer."""
MOST_THREADS = 32

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NOTHING_ALLOWED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class Answer:
    """Response to a request."""

    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    policy: str = NOTHING_ALLOWED
    """Content security policy of a page."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def page(cls, page: Page, title: str, source: PageSource) -> Answer:
        """Return a page, which requests its data itself."""
        policy = page.policy(has_source=True) + "; frame-ancestors 'none'"
        text = page.html(title=title, source=source)
        return cls(_bytes(text), "text/html; charset=utf-8", policy=policy)

    @classmethod
    def problem(cls, status: HTTPStatus, text: str, **headers: str) -> Answer:
        """Return an error response with a line of text."""
        return cls(f"{text}\n".encode(), status=status, headers=headers)


Respond = Callable[[str, Mapping[str, str]], Answer | None]
"""Returns the answer for a request's path and query; None if there is no such document."""


class PageServer(ThreadingHTTPServer):
    """HTTP server, which serves until `shutdown`.

    Args:
        host: Name or address to listen on.
        port: Port to listen on; 0 takes a free one.
        respond: Makes the documents; called by several threads.
        names: Host names that requests may use, besides those of this machine.
        token: Secret that a request must know; None makes one.

    Attributes:
        idle: Connections that wait for a request, the longest first.

    Raises:
        OSError: It cannot listen there.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(
        self,
        host: str,
        port: int,
        respond: Respond,
        *,
        names: tuple[str, ...] = (),
        token: str | None = None,
    ) -> None:
        self.token = token or secrets.token_urlsafe(24)
        # Cookies ignore ports: servers of one machine would overwrite each other's.
        self.cookie = f"trainctl-{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"
        self.respond = respond
        own = {host, "localhost", socket.gethostname(), socket.getfqdn(), *names}
        self.names = {name.lower().rstrip(".") for name in own}
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._free = threading.BoundedSemaphore(MOST_THREADS)
        self.idle: dict[socket.socket, None] = {}
        super().__init__(found[0][4][:2], _Handler)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """Address for a browser on this machine, with the token."""
        host, port = self.server_address[:2]
        address = ipaddress.ip_address(str(host))
        if address.is_unspecified:
            name = socket.gethostname()
        else:
            name = f"[{address}]" if address.version == 6 else str(address)
        return f"http://{name}:{port}/?token={self.token}"

    def knows_name(self, host: str) -> bool:
        """Return True if the `Host` of a request is an IP address, or a name of this server."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self.names
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in a thread, in place of an idle connection's if all are taken.

        The request is closed if `MOST_THREADS` are busy.
        """
        is_free = self._free.acquire(blocking=False)
        for connection in [] if is_free else list(self.idle)[:1]:
            self.idle.pop(connection, None)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # its thread reads an end, and ends
        if not is_free and not self._free.acquire(timeout=1.0):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: browsers often drop connections."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "trainctl"
    sys_version = ""
    timeout = TIMEOUT_SECONDS

    def handle_one_request(self) -> None:
        self.server.idle[self.connection] = None
        try:
            super().handle_one_request()
        finally:
            self.server.idle.pop(self.connection, None)

    def parse_request(self) -> bool:
        self.server.idle.pop(self.connection, None)
        return super().parse_request()

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # an unread body would be parsed as a request
        self._send(self._answer())

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self.close_connection = True  # a body may follow, which is not read
        text = "only GET and HEAD"
        self._send(Answer.problem(HTTPStatus.METHOD_NOT_ALLOWED, text, Allow="GET, HEAD"))

    def _answer(self) -> Answer:
        if not self.server.knows_name(self.headers.get("Host", "")):
            return Answer.problem(
                HTTPStatus.MISDIRECTED_REQUEST, "not a name of this server; see --allow-name"
            )
        try:
            asked = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(asked.query).items()}
        except ValueError:
            return Answer.problem(HTTPStatus.BAD_REQUEST, "no address")
        given = query.pop("token", None)
        if given is not None and self._is_token(given):
            place = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Lax"
            headers = {"Location": _own_path(asked.path), "Set-Cookie": place}
            return Answer(status=HTTPStatus.SEE_OTHER, headers=headers)
        if given is not None or not self._has_token():
            return Answer.problem(
                HTTPStatus.FORBIDDEN, "the address that `trainctl watch` printed has the token"
            )
        try:
            found = self.server.respond(asked.path, query)
        except Exception:  # a bug: print it here, and keep serving
            traceback.print_exc()
            text = "this is a bug; the terminal of the server says more"
            return Answer.problem(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        return found or Answer.problem(HTTPStatus.NOT_FOUND, "there is no such page")

    def _has_token(self) -> bool:
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return True
        # Other servers of this machine may have set cookies of any form.
        cookies = self.headers.get("Cookie", "").split(";")
        pairs = (cookie.strip().partition("=") for cookie in cookies)
        return any(name == self.server.cookie and self._is_token(value) for name, _, value in pairs)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        headers = {**HEADERS, "Content-Security-Policy": answer.policy, **answer.headers}
        if answer.status != HTTPStatus.NO_CONTENT:
            headers |= {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request."""
        self.close_connection = True
        self.command = self.command or "GET"
        self._send(Answer.problem(HTTPStatus(code), message or "no request"))

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: addresses contain the token."""


def _own_path(path: str) -> str:
    r"""Return a path that no browser reads as another host, or `/` in place of one that some do.

    A browser reads `\\` as `/`, so that `/\\host/` and `//host/` are the same.
    """
    is_own = path.startswith("/") and path[1:2] not in ("/", "\\")
    return quote(path, safe="/%:@!$&'()*+,;=~") if is_own else "/"
