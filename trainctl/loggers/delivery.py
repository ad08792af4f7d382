"""How an alert reaches people: a POST to a webhook, or a program of the user's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainctl.config.secrets import resolve_text
from trainctl.runs.processes import PARENT_VARIABLE

POST_SECONDS = 10.0
COMMAND_SECONDS = 30.0


class Refused(Exception):
    """A server understood, and does not want it: trying again will rarely help."""


class _Elsewhere(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: it would be a GET without the alert, which is then lost."""

    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, alert: Mapping[str, Any]) -> None:
    """Send an alert as JSON.

    Args:
        url: A reference to the variable that has it. What goes wrong is told without its value.
        alert: What is told.

    Raises:
        Refused: Its server answers with 3xx or 4xx, but not because there is too much to do.
        OSError: It cannot be reached, or answers otherwise.
        TrainctlError: The variable is not set.
    """
    target = resolve_text(url, os.environ)
    if not target.startswith(("http://", "https://")):
        raise OSError("what it stands for is no URL of http or https")
    try:
        request = urllib.request.Request(
            target,
            data=json.dumps(alert, ensure_ascii=False).encode(errors="backslashreplace"),
            headers={"Content-Type": "application/json", "User-Agent": "trainctl"},
            method="POST",
        )
        urllib.request.build_opener(_Elsewhere).open(request, timeout=POST_SECONDS).close()
    except urllib.error.HTTPError as error:
        told = f"the server answers {error.code}"
        if 300 <= error.code < 500 and error.code not in (408, 425, 429):
            raise Refused(told) from None
        raise OSError(told) from None
    except urllib.error.URLError as error:
        reason = error.reason
        known = reason.strerror if isinstance(reason, OSError) else None
        raise OSError(known or f"it cannot be reached: {type(reason).__name__}") from None
    except Exception as error:  # of http.client; some have the URL in them
        raise OSError(f"it cannot be told: {type(error).__name__}") from None


def start(command: Sequence[str], alert: Mapping[str, Any]) -> None:
    """Run a program with an alert as JSON on its input, which ends with this process.

    Args:
        command: It and its arguments; no shell sees them.
        alert: What is told.

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
