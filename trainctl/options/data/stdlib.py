"""Source files of the running Python's standard library: a text that every machine has."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from trainctl.config.schema import DataConfig
from trainctl.options.data import DataSource
from trainctl.readers import plain

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders without sources of the library: tests, installed packages, caches."""


def source_files(section: DataConfig) -> list[Path]:
    """Return the source files of the standard library, sorted."""
    found = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


SPEC = DataSource(
    name="stdlib",
    keys=DataConfig,
    build="trainctl.readers.plain:read",
    files=source_files,
    is_plain=True,
    is_demonstration=True,
    places=plain.line_numbers,
    identity=lambda section: "text",  # in place of a `text_key`
)
