"""Specification of a tokenizer: its files, and what is known of its ids before a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.registry import Spec, spec_lookup
from trainctl.config.schema import TokenizerConfig, TokenizerFromPath
from trainctl.config.suggest import words
from trainctl.models.local_path import local_path
from trainctl.models.tokenizer_files import TokenizerFacts

PUBLISHED = words(
    """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt vocab.txt tokenizer.model chat_template.jinja
    """
)
"""Tokenizer files that a transformers directory may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource(Spec):
    """Specification of one kind of tokenizer.

    Its `build` is called with the section and returns a `data.tokenizer.Tokenizer`. No torch is
    loaded then.
    """

    facts: Callable[[Any], TokenizerFacts]
    """Function that returns the ids and the end of a document for a section, without the
    tokenizer's library.
    """
    file: Callable[[Any], Path] | None = None
    """Function that returns the file that `facts` reads for a section; None if no file is needed.
    """
    path_is: str = ""
    """Target of `tokenizer.path`, for messages; empty if the kind has no such key."""
    is_directory: bool = False
    """Whether `tokenizer.path` names a transformers directory; null then means the model's own
    directory.
    """
    is_byte_level: bool = False
    """Whether ids below 256 are the bytes of the text."""
    published: Callable[[Any], Mapping[str, Path]] | None = None
    """Function that returns the tokenizer files of an export, by their names there."""
    why_not_published: str = ""
    """Reason why an export has no tokenizer files, and the meaning of its ids."""


spec_of = spec_lookup(TokenizerConfig, TokenizerSource)
"""Return the specification of the configured tokenizer."""


def tokenizer_facts(section: TokenizerConfig) -> TokenizerFacts:
    """Return what is known of the configured tokenizer without its library.

    Raises:
        TrainctlError: A file is missing or malformed; the message names it.
    """
    return spec_of(section).facts(section)


def path_of(section: TokenizerFromPath) -> Path:
    """Return `tokenizer.path`, with `~` expanded."""
    return local_path(section.path or "")


def published_in(folder: Path) -> dict[str, Path]:
    """Return the tokenizer files in a transformers directory, by name."""
    return {name: folder / name for name in PUBLISHED if (folder / name).is_file()}
