"""The tokenizer of a transformers directory."""

from __future__ import annotations

from pathlib import Path

from trainctl.config.schema import TokenizerFromPath
from trainctl.models.tokenizer_files import read_facts
from trainctl.options.tokenizer import TokenizerSource, path_of, published_in


def file(section: TokenizerFromPath) -> Path:
    """Return the path of `tokenizer.json` in the directory."""
    return path_of(section) / "tokenizer.json"


SPEC = TokenizerSource(
    name="hf",
    keys=TokenizerFromPath,
    build="trainctl.data.tokenizer:file_tokenizer",
    facts=lambda section: read_facts(file(section)),
    file=file,
    path_is="directory",
    is_directory=True,
    published=lambda section: published_in(path_of(section)),
)
