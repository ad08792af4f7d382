"""Files and folders that a configuration names: whether they are there, and of text what is in
them. For launches from here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainctl.config.schema import RunConfig, TokenizerFromPath
from trainctl.config.text.check import MISSING, check_text
from trainctl.config.text.choice import check_choice
from trainctl.config.user_code import check_user_code
from trainctl.errors import Finding


def missing_files(config: RunConfig, folder: Path | None = None) -> list[Finding]:
    """A finding for each path without a file, missing code, and what is wrong with the corpus.

    Args:
        config: The configuration.
        folder: Where the user's code is looked for; None is the current folder.
    """
    findings = check_user_code(config, folder)
    if not config.trains_itself:
        return findings  # the corpus and the tokenizer are for trainctl's trainer
    findings += [*check_text(config), *check_choice(config)]
    findings += [
        Finding(rule=MISSING, key=key, message=f"{path} does not exist")
        for key, path in _paths(config)
        if not Path(path).expanduser().exists()
    ]
    return findings


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config.tokenizer, TokenizerFromPath) and config.tokenizer.path:
        yield "tokenizer.path", config.tokenizer.path
    if config.model.initial_weights:
        yield "model.initial_weights", config.model.initial_weights
