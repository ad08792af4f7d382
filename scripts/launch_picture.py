"""Draw the terminal output of `trainctl launch recipe=tiny` as docs/images/launch.svg.

    python scripts/launch_picture.py

The recipe trains for some minutes in a pseudo-terminal. Step lines from step 30 to step 140 are
replaced by a mark.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

TARGET = Path(__file__).parents[1] / "docs" / "images" / "launch.svg"
COMMAND = "trainctl launch recipe=tiny"
COLUMNS = 86
LEFT_OUT = re.compile(r"step (30|[4-9]0|1[0-4]0)/160 |\S+ at step 80")
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Font declarations that a browser would fetch from another host."""


def terminal_lines(folder: Path) -> list[str]:
    """Run the command in the folder, and return the lines on its terminal at the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        COMMAND.split(), cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # the last writer has closed the terminal
            break
    if process.wait():
        raise SystemExit(written.decode())
    text = written.decode().replace(f"{folder}/", "")
    return [re.split("\r\x1b\\[J", line)[-1].rstrip("\r") for line in text.split("\n")]


def shortened(lines: list[str]) -> list[str]:
    kept: list[str] = []
    for line in lines:
        if not LEFT_OUT.match(line):
            kept.append(line)
        elif kept[-1] != "…":
            kept.append("…")
    return kept


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        lines = terminal_lines(Path(name).resolve())
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {COMMAND}", style="bold"))
    for line in shortened(lines):
        console.print(Text.from_ansi(line))
    TARGET.parent.mkdir(exist_ok=True)
    svg = console.export_svg(title="trainctl", theme=MONOKAI, unique_id="launch")
    TARGET.write_text(FONT.sub("", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
