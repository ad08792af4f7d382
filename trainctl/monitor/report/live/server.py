"""A small HTTP server for documents that are made on demand.

It knows its few addresses and reads no path from a request, so it cannot give away a file. A
request must know the token: it is in the address that is printed, then in a cookie. The `Host` of a
request must be an IP address or a name of this machine, so that no other site can have a browser
send requests here under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

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
        """Handle a request in a thread; close it if `MOST_THREADS` are busy."""
        if not self._free.acquire(timeout=1.0):
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
