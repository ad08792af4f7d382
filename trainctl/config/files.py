"""Files and folders that a configuration names: whether they are there. For launches from here."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from trainctl.config.schema import DataKind, RunConfig, TokenizerKind
from trainctl.errors import Finding

MISSING = "TC115"


def missing_files(config: RunConfig) -> list[Finding]:
    """A finding for each glob without a match and each path without a file."""
    findings = [
        Finding(
            rule=MISSING,
            key=key,
            message=f"no file matches {pattern!r}",
            hint="globs are relative to the current folder; ** crosses folders",
        )
        for key, pattern in _globs(config)
        if next(glob.iglob(str(Path(pattern).expanduser()), recursive=True), None) is None  # noqa: PTH207
    ]
    findings += [
        Finding(rule=MISSING, key=key, message=f"{path} does not exist")
        for key, path in _paths(config)
        if not Path(path).expanduser().exists()
    ]
    return findings


def _globs(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.data.kind is DataKind.files:
        for key in ("paths", "held_out_paths"):
            for pattern in getattr(config.data, key):
                yield f"data.{key}", pattern


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.tokenizer.kind is not TokenizerKind.byte and config.tokenizer.path:
        yield "tokenizer.path", config.tokenizer.path
    if config.model.initial_weights:
        yield "model.initial_weights", config.model.initial_weights
