"""Texts with a line of their own between them, as the files of `fortune` have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainctl.config.schema import DataConfig, DataFromPaths
from trainctl.config.schema.option import option
from trainctl.options.data import DataSource
from trainctl.readers.check import FileProblem
from trainctl.readers.documents import Document, Reader


@dataclass
class FortunesKeys(DataFromPaths):
    """Keys of `data=fortunes`, beside those of every source of files."""

    divider: str = option("%", "Line between two texts.")


def problem(file: Path, section: DataConfig) -> FileProblem | None:
    """Return the problem of an empty file, which has no text."""
    if file.stat().st_size:
        return None
    return FileProblem("FORTUNES1", "empty", f"{file} is empty", "leave it out of data.paths")


def read(reader: Reader, file: Path) -> Iterator[Document]:
    """Yield the texts of a file, each with its first line."""
    section = reader.config
    assert isinstance(section, FortunesKeys)
    whole = reader.decoded(file.read_bytes(), str(file), whole=True) or ""
    line = 1
    for text in whole.split(f"\n{section.divider}\n"):
        yield Document(text, file, line)
        line += text.count("\n") + 2


SPEC = DataSource(
    name="fortunes",
    keys=FortunesKeys,
    build=read,
    endings=(".fortunes",),
    problem=problem,
    is_plain=True,
)
