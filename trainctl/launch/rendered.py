"""Rendering of a launch: everything that a launcher would do, before it does it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainctl.runs.atomic import write_text
from trainctl.runs.command import AttemptCommand, write_command
from trainctl.runs.layout import AttemptPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Commands to start for an attempt, and files to write for it."""

    command: AttemptCommand
    """The command of each node."""
    commands: tuple[tuple[str, ...], ...]
    """Command lines that the launcher itself runs to start the nodes, in order."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the attempt's folder: text by name."""

    @property
    def text(self) -> str:
        """The commands as a person could type them."""
        return "".join(f"{shlex.join(argv)}\n" for argv in self.commands)

    def write(self, attempt: AttemptPaths) -> None:
        """Write `command.json`, `commands.txt` and the files to the attempt's folder."""
        write_command(attempt, self.command)
        write_text(attempt.root / "commands.txt", self.text)
        for name, text in self.files.items():
            write_text(attempt.root / name, text)
