"""A `tokenizer.json` file of the tokenizers library."""

from __future__ import annotations

from pathlib import Path

from trainctl.config.schema import TokenizerFromPath
from trainctl.models.tokenizer_files import read_facts
from trainctl.options.tokenizer import TokenizerSource, path_of, published_in


def published(section: TokenizerFromPath) -> dict[str, Path]:
    """Return the file and other tokenizer files beside it, by name."""
    file = path_of(section)
    return published_in(file.parent) | {"tokenizer.json": file}


SPEC = TokenizerSource(
    name="file",
    keys=TokenizerFromPath,
    build="trainctl.data.tokenizer:file_tokenizer",
    facts=lambda section: read_facts(path_of(section)),
    file=path_of,
    path_is="tokenizer.json",
    published=published,
)
