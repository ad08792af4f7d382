"""Questions to child processes: one framed protocol for all that code of others may damage.

A child runs what may raise, hang, crash or write where it should not: a user's function, a model's
own code, a chat template, pyarrow on a damaged file. Parent and child exchange frames over a socket
pair: the id of the question, the length, and the content. A reply has the id of its question, a
limited length, and one deadline for all of it. Anything else that arrives is `NoReply`, after which
the child is not asked again.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NoReturn, Self

MOST_BYTES = 1 << 30
"""Default limit of a reply."""

_HEADER = struct.Struct("!8sQ")
_CHUNK = 1 << 20
_END_SECONDS = 1.0
"""Time for a child that has closed its connection to end, so that its exit code can be told."""


class NoReply(Exception):
    """A question without a reply; the message says what the child did instead."""


class ReplyTimeout(NoReply):
    """A reply that was not complete in time."""


class Channel:
    """The parent's end of a socket pair; not safe for threads.

    Args:
        connection: A connected stream socket, which the channel closes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._id = connection, b""

    def ask(self, question: bytes, seconds: float, most_bytes: int = MOST_BYTES) -> bytes:
        """Send a question and return its reply.

        Args:
            seconds: Time limit for question and reply together.

        Raises:
            NoReply: No reply to this question, within the limits, has come.
        """
        with self._failures(seconds):
            deadline = time.monotonic() + seconds
            self._send(question, seconds)
            return self._receive(deadline, most_bytes)

    def ask_json(
        self, question: Mapping[str, Any], seconds: float, most_bytes: int = MOST_BYTES
    ) -> dict[str, Any]:
        """Return the reply to a question, both of which are JSON objects.

        Raises:
            NoReply: As in `ask`.
        """
        return parse_object(self.ask(json.dumps(question).encode(), seconds, most_bytes))

    def send(self, question: bytes, seconds: float) -> None:
        """Send a question without waiting for its reply."""
        with self._failures(seconds):
            self._send(question, seconds)

    def receive(self, seconds: float, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the reply to the last question.

        Raises:
            NoReply: As in `ask`.
        """
        with self._failures(seconds):
            return self._receive(time.monotonic() + seconds, most_bytes)

    @contextmanager
    def _failures(self, seconds: float) -> Iterator[None]:
        """Raise `NoReply` for what goes wrong with the connection."""
        try:
            yield
        except TimeoutError:
            raise ReplyTimeout(f"took more than {seconds:g} s") from None
        except (EOFError, OSError):
            raise NoReply(self._describe_end()) from None

    def _send(self, question: bytes, seconds: float) -> None:
        self._id = os.urandom(8)  # a reply that did not read the question does not match
        self._connection.settimeout(seconds)
        _send_frame(self._connection, self._id, question)

    def _receive(self, deadline: float, most_bytes: int) -> bytes:
        identity, length = _HEADER.unpack(_read(self._connection, _HEADER.size, deadline))
        if identity != self._id:
            raise NoReply("sent what is no reply to its question")
        if length > most_bytes:
            raise NoReply(f"sent a reply of {length:,} bytes, and at most {most_bytes:,} are taken")
        return _read(self._connection, length, deadline)

    def is_readable(self, seconds: float = 0.0) -> bool:
        """Wait for data, or for the child to close its end; return whether either has come."""
        poller = select.poll()  # unlike `select`, for descriptors above 1,023 too
        poller.register(self._connection, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def close(self) -> None:
        self._connection.close()

    def _describe_end(self) -> str:
        return "closed its connection"


class ChildProcess(Channel):
    """A process started to answer questions by `serve`; a context manager, which kills it.

    Args:
        arguments: Arguments of Python, such as `-P`, `-m` and a module.
        environment: Environment variables; None takes those of this process.
        output: File for what the child prints; None is this process's stderr.
        has_own_session: Whether what the child starts is killed with it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
        has_own_session: bool = False,
    ) -> None:
        ours, its = socket.socketpair()
        self._has_own_session = has_own_session
        with its:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=its.fileno(),
                stdout=2 if output is None else output,
                stderr=output,
                env=environment,
                start_new_session=has_own_session,
            )
        super().__init__(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        """Whether the child runs, and has sent nothing that was not received."""
        return self._process.poll() is None and not self.is_readable()

    def kill(self) -> int:
        """Kill the child if it has not ended; return its exit code, negative for a signal."""
        with suppress(ProcessLookupError):
            if self._has_own_session:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self.close()
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _describe_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_SECONDS)
            if code >= 0:
                return f"ended with exit code {code}"
            return f"was ended by {signal.Signals(-code).name}"
        return super()._describe_end()


def parse_object(reply: bytes) -> dict[str, Any]:
    """Return the JSON object in a reply.

    Raises:
        NoReply: It is none.
    """
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NoReply("sent a reply that is no JSON object")
    return found


def serve(answer: Callable[[bytes], bytes], connection: socket.socket | None = None) -> NoReturn:
    """Answer questions until the parent closes its end; ends the process.

    A fork of this process that code of others made, and that comes back here, ends silently.

    Args:
        answer: Returns the reply to a question; what it raises ends the process.
        connection: The child's end of the pair; None is stdin, where `ChildProcess` puts it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    owner = os.getpid()
    if connection is None:
        connection = socket.socket(fileno=os.dup(0))
        with open(os.devnull) as nothing:  # noqa: PTH123  (no more imports than needed)
            os.dup2(nothing.fileno(), 0)
    while True:
        try:
            identity, length = _HEADER.unpack(_read(connection, _HEADER.size))
            question = _read(connection, length)
        except (EOFError, OSError):
            os._exit(0)
        reply = answer(question)
        if os.getpid() != owner:
            os._exit(0)
        with suppress(OSError):  # the next read tells
            _send_frame(connection, identity, reply)


def _send_frame(connection: socket.socket, identity: bytes, content: bytes) -> None:
    connection.sendall(_HEADER.pack(identity, len(content)) + content)


def _read(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Read exactly `count` bytes.

    Raises:
        EOFError: The other end is closed.
        TimeoutError: They have not all come by the deadline, a time of `time.monotonic`.
    """
    found = bytearray()
    while len(found) < count:
        if deadline is not None:
            # Data that has come is read even if the deadline has passed.
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(min(count - len(found), _CHUNK))
        if not part:
            raise EOFError
        found += part
        if deadline is not None and time.monotonic() > deadline and len(found) < count:
            raise TimeoutError
    return bytes(found)
