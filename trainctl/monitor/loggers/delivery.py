"""Delivery of alerts: by a POST to a webhook, or by a program of the user's."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainctl.config.secrets import resolve_text
from trainctl.runs.processes import PARENT_VARIABLE

POST_SECONDS = 10.0
"""Time limit of a POST in all, however often its server sends a byte."""
COMMAND_SECONDS = 30.0


class Refused(Exception):
    """The server understood the alert and refused it: trying again will rarely help."""


class _Elsewhere(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would be a GET without the alert, which would be lost."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Cuttable(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """HTTP connections that can be cut in the middle of an answer; their timeout is per read."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: list[http.client.HTTPConnection] = []
        self.is_cut = False

    def http_open(self, request: urllib.request.Request) -> Any:
        return self._open(http.client.HTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self._open(http.client.HTTPSConnection, request)

    def cut(self) -> None:
        """Shut down every connection, so that reading from it fails."""
        self.is_cut = True  # before the reader sees the end of what it reads
        for connection in self._connections:
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _open(self, kind: type[http.client.HTTPConnection], request: urllib.request.Request) -> Any:
        def kept(*arguments: Any, **settings: Any) -> http.client.HTTPConnection:
            self._connections.append(kind(*arguments, **settings))
            return self._connections[-1]

        return self.do_open(kept, request)


def post(url: str, alert: Mapping[str, Any]) -> None:
    """Send an alert as JSON to a webhook.

    Args:
        url: Reference to the variable that holds the URL. Error messages never contain its value.

    Raises:
        Refused: The server answers with 3xx or 4xx, except for being overloaded.
        OSError: It cannot be reached, or answers with another error.
        TrainctlError: The variable is not set.
    """
    target = resolve_text(url, os.environ)
    if not target.startswith(("http://", "https://")):
        raise OSError("what it stands for is no URL of http or https")
    handler = _Cuttable()
    timer = threading.Timer(POST_SECONDS, handler.cut)
    timer.daemon = True
    timer.start()
    try:
        request = urllib.request.Request(
            target,
            data=json.dumps(alert, ensure_ascii=False).encode(errors="backslashreplace"),
            headers={"Content-Type": "application/json", "User-Agent": "trainctl"},
            method="POST",
        )
        opener = urllib.request.build_opener(_Elsewhere, handler)
        opener.open(request, timeout=POST_SECONDS).close()
        if handler.is_cut:  # truncated headers look complete
            raise TimeoutError
    except urllib.error.HTTPError as error:
        told = f"the server answers {error.code}"
        if 300 <= error.code < 500 and error.code not in (408, 425, 429):
            raise Refused(told) from None
        raise OSError(told) from None
    except urllib.error.URLError as error:
        reason = error.reason
        known = reason.strerror if isinstance(reason, OSError) else None
        raise OSError(known or f"it cannot be reached: {type(reason).__name__}") from None
    except Exception as error:  # of http.client; some messages contain the URL
        if handler.is_cut:
            raise OSError(f"it did not answer within {POST_SECONDS:g} s") from None
        raise OSError(f"it cannot be told: {type(error).__name__}") from None
    finally:
        timer.cancel()


def start(command: Sequence[str], alert: Mapping[str, Any]) -> None:
    """Run a program with an alert as JSON on its stdin; it ends with this process.

    Args:
        command: The program and its arguments, run without a shell.

    Raises:
        OSError: It cannot be started, fails, or takes too long.
    """
    tied = [sys.executable, "-P", "-m", "trainctl.runs.tied_entry", str(int(signal.SIGKILL))]
    process = subprocess.Popen(
        [*tied, *command],
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(alert).encode(), timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"it did not end within {COMMAND_SECONDS:.0f} s") from None
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise OSError(f"it ended with {process.returncode}")
