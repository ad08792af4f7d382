"""Checks of the files and folders that a configuration names, for launches from this machine.

Paths must exist. Of a corpus the content is checked too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainctl.config.registry import load
from trainctl.config.schema import RunConfig, TokenizerFromPath
from trainctl.config.user_code import check_user_code
from trainctl.errors import Finding, TrainctlError
from trainctl.models.tokenizer_files import read_chat_template
from trainctl.readers.check import MISSING, check_quality_inputs, check_text

NO_TOKENIZER, NO_TEMPLATE = "TC073", "TC367"


def missing_files(config: RunConfig, folder: Path | None = None) -> list[Finding]:
    """Return a finding for each missing path, for missing code, and for each problem of the corpus.

    Args:
        folder: Where the user's code is looked up; None is the current directory.
    """
    findings = [*check_user_code(config, folder), *_no_python(config)]
    if not config.trains_itself:
        return findings  # only trainctl's trainer needs corpus and tokenizer
    findings += [*check_text(config), *check_quality_inputs(config)]
    findings += [*_without_tokenizer(config), *_without_template(config)]
    findings += [
        Finding(rule=MISSING, key=key, message=f"{path} does not exist")
        for key, path in _paths(config)
        if not Path(path).expanduser().exists()
    ]
    return findings


def _without_tokenizer(config: RunConfig) -> Iterator[Finding]:
    """Find a tokenizer kind that needs a file where none is named."""
    section = config.tokenizer
    if isinstance(section, TokenizerFromPath) and not section.path:
        yield Finding(
            rule=NO_TOKENIZER,
            key="tokenizer.path",
            message=f"tokenizer.kind={section.kind} needs tokenizer.path",
            hint=f"tokenizer.path=/path/to/{load('tokenizer', section.kind).path_is}",
        )


def _no_python(config: RunConfig) -> Iterator[Finding]:
    """Find a `logging.python` that cannot be executed, whether or not a logger needs it now."""
    python = config.logging.python
    if python and shutil.which(Path(python).expanduser()) is None:
        yield Finding(
            rule=MISSING,
            key="logging.python",
            message=f"{python} is no program that can be started",
            hint="the path of an environment's Python, such as /opt/trackers/bin/python",
        )


def _without_template(config: RunConfig) -> Iterator[Finding]:
    """Find sources of conversations without a chat template."""
    file = load("tokenizer", config.tokenizer.kind).file
    is_named = not isinstance(config.tokenizer, TokenizerFromPath) or config.tokenizer.path
    sources: dict[str, Any] = {
        f"data.sources.{name}": each for name, each in config.data.sources.items()
    }
    for key, section in (sources or {"data": config.data}).items():
        source, named = load("data", section.kind), getattr(section, "chat_template", None)
        # Pairs of plain texts need no template.
        asks = source.encoder and (named is not None or not source.has_pairs)
        if asks and config.data.factory is None and is_named:
            tokenizer = file(config.tokenizer) if file else None
            if tokenizer is None or tokenizer.is_file():  # another finding reports a missing file
                try:
                    read_chat_template(tokenizer, named)
                except TrainctlError as error:
                    yield Finding(
                        rule=NO_TEMPLATE,
                        key=f"{key}.chat_template",
                        message=error.message,
                        hint=error.hint,
                    )


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config.tokenizer, TokenizerFromPath) and config.tokenizer.path:
        yield "tokenizer.path", config.tokenizer.path
    if config.model.initial_weights:
        yield "model.initial_weights", config.model.initial_weights
