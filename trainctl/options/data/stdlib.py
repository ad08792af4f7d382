"""The source files of the running Python's standard library: text that every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from trainctl.config.schema import DataConfig
from trainctl.config.text import plain
from trainctl.options.data import DataSource

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that are not its own source: tests, installed packages, caches."""


def files(section: DataConfig) -> list[Path]:
    """Its modules, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = root.rglob("*.py")
    return sorted(file for file in found if not _SKIPPED & set(file.parts[len(root.parts) :]))


SPEC = DataSource(
    name="stdlib",
    keys=DataConfig,
    build="trainctl.config.text.plain:read",
    files=files,
    is_plain=True,
    places=plain.places,
    identity=lambda section: "text",  # where others have their `text_key`
)
