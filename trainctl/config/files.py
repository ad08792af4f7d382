"""Files and folders that a configuration names: whether they are there. For launches from here."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from trainctl.config.schema import DataKind, RunConfig, TokenizerKind
from trainctl.config.user_code import check_user_code
from trainctl.errors import Finding

MISSING = "TC115"


def missing_files(config: RunConfig, folder: Path | None = None) -> list[Finding]:
    """A finding for each glob without a match, path without a file, and missing code.

    Args:
        config: The configuration.
        folder: Where the user's code is looked for; None is the current folder.
    """
    findings = check_user_code(config, folder)
    if not config.trains_itself:
        return findings  # the corpus and the tokenizer are for trainctl's trainer
    findings += [
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
    if config.data.kind is DataKind.files and config.data.factory is None:
        for key in ("paths", "held_out_paths"):
            for pattern in getattr(config.data, key):
                yield f"data.{key}", pattern


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.tokenizer.kind is not TokenizerKind.byte and config.tokenizer.path:
        yield "tokenizer.path", config.tokenizer.path
    if config.model.initial_weights:
        yield "model.initial_weights", config.model.initial_weights
