"""What a tokenizer says of itself: the files that it is read from, and its ids, before a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.registry import Spec, load
from trainctl.config.schema import TokenizerConfig, TokenizerFromPath
from trainctl.config.special_tokens import TokenizerFacts

PUBLISHED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files that a transformers directory may have of a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource(Spec):
    """What one kind of tokenizer is made of.

    Its `build` is called with the section and gives a `train.tokenizer.Tokenizer`. No torch is
    loaded then.
    """

    facts: Callable[[Any], TokenizerFacts]
    """Gives, of its section, its ids, and what ends a document; without its library."""
    file: Callable[[Any], Path] | None = None
    """Gives, of its section, the file that says so; None where none is needed."""
    path_is: str = ""
    """What `tokenizer.path` names, where it has that key."""
    is_directory: bool = False
    """Whether that is a transformers directory: none is then the model's own."""
    is_byte_level: bool = False
    """Whether ids below 256 are the text's own bytes."""
    published: Callable[[Any], Mapping[str, Path]] | None = None
    """Gives, of its section, what an export has of it, by the name that it has there."""
    why_not_published: str = ""
    """Why an export has nothing, and what its ids are."""


def spec_of(section: TokenizerConfig) -> TokenizerSource:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("tokenizer", section.kind)
    assert isinstance(spec, TokenizerSource)
    return spec


def tokenizer_facts(section: TokenizerConfig) -> TokenizerFacts:
    """What is known of the configured tokenizer without its library.

    Raises:
        TrainctlError: A file is missing or malformed; names it.
    """
    return spec_of(section).facts(section)


def path_of(section: TokenizerFromPath) -> Path:
    """What `tokenizer.path` names."""
    return Path(section.path or "").expanduser()


def published_in(folder: Path) -> dict[str, Path]:
    """Return a tokenizer's files in a transformers directory, by name."""
    return {name: folder / name for name in PUBLISHED if (folder / name).is_file()}
