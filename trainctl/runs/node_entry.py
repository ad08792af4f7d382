"""Entry on another machine: execute the command that the first line of stdin describes.

So neither arguments nor variables pass through the remote shell, and no process list shows them
before the command runs. The rest of stdin is the command's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainctl.errors import ExitCode


def encode_command(argv: Sequence[str], environment: Mapping[str, str], folder: Path) -> bytes:
    """Return the line on stdin from which `main` executes the command.

    Args:
        environment: Variables added to the remote login's.
    """
    record = {"argv": list(argv), "environment": dict(environment), "folder": str(folder)}
    return json.dumps(record).encode() + b"\n"


def main() -> int:
    """Execute the command; returns only if that fails."""
    record = json.loads(_read_line(sys.stdin.fileno()))
    folder, argv = record["folder"], record["argv"]
    try:
        os.chdir(folder)
    except OSError as error:
        print(f"error: the folder {folder} is not there: {error.strerror}", file=sys.stderr)
        return int(ExitCode.environment)
    try:
        os.execvpe(argv[0], argv, {**os.environ, **record["environment"]})
    except OSError as error:
        print(f"error: cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        return int(ExitCode.environment)


def _read_line(descriptor: int) -> bytes:
    """Read a line and not a byte more: the command reads what follows."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit("error: the launcher ended before it said what to start")
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
