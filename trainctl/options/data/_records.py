"""Sources of records: one object of JSONL, a JSON array, Parquet, Arrow or a saved dataset is one
document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import DataConfig, DataFromPaths
from trainctl.config.schema.option import option
from trainctl.options.data import DataSource, arrow, parquet
from trainctl.readers import plain
from trainctl.readers.check import FileProblem
from trainctl.readers.conversations import BadRecord, as_text, renamed
from trainctl.readers.documents import Document, Reader
from trainctl.readers.remote import File
from trainctl.readers.stream import uncompressed_name
from trainctl.readers.tables import first_problem

ReadRecord = Callable[[Any, Any], dict[str, Any]]
"""Function of a record and the source's section that returns what the document has, as plain JSON.
It raises `BadRecord` for a record that is none of this source.
"""


@dataclass
class RecordsConfig(DataFromPaths):
    """Keys of records that are read by the names of their keys."""

    columns: dict[str, str] = option(
        {},
        "The records' own keys by the names that they are read by, such as messages, prompt, "
        "chosen, instruction or output; role and content are those of messages.",
        example="{messages: dialog, role: speaker, content: text}",
    )


@dataclass
class TemplateConfig(RecordsConfig):
    """Keys of records whose messages a chat template renders."""

    chat_template: str | None = option(
        None,
        "Jinja file with the chat template, or the name of one of the tokenizer's templates; "
        "none is the tokenizer's default.",
        local=True,
    )
    template_arguments: dict[str, Any] = option(
        {},
        "Additional variables passed to the chat template, by name.",
        example="{enable_thinking: false}",
    )


def source_of_records(
    name: str,
    read_record: ReadRecord,
    identity: Callable[[Any], str] = lambda section: "",
    **facts: Any,
) -> DataSource:
    """Return the specification of a source of records.

    Args:
        identity: Returns what the documents depend on beside the files and the source's name.
        facts: Further fields of the specification.
    """

    def read(reader: Reader, file: File, span: tuple[int, int] | None = None) -> Iterator[Document]:
        columns = getattr(reader.config, "columns", {})
        for number, record, where in _records(reader, file, span):
            try:
                found = read_record(renamed(record, columns), reader.config)
            except BadRecord as bad:
                reader.apply_bad_text_policy(where, str(bad))
                continue
            text = reader.clean(as_text(found), where)
            if text is not None:
                yield Document(text, file, number)

    def problem(file: File, section: DataConfig) -> FileProblem | None:
        return first_problem(file, section, read)

    def identity_of(section: Any) -> str:
        columns = getattr(section, "columns", {})
        own = f"{name} {identity(section)}".rstrip()
        return f"{own} {json.dumps(columns, sort_keys=True)}" if columns else own

    return DataSource(
        name=name,
        build=read,
        endings=(".jsonl", *parquet.SPEC.endings, *arrow.SPEC.endings),
        choose=arrow.choose_files,
        ranges=_ranges,
        counts_lines=True,
        problem=problem,
        identity=identity_of,
        **facts,
    )


def _records(
    reader: Reader, file: File, span: tuple[int, int] | None
) -> Iterator[tuple[int, Any, str]]:
    """Yield each record with its line or row number, from 1, and its location as text.

    Raises:
        TrainctlError: Reading the file fails.
    """
    name = uncompressed_name(file)
    if name.endswith(parquet.SPEC.endings):
        for row, record in parquet.records(file):
            yield row, record, f"{file}, row {row:,}"
    elif name.endswith(arrow.SPEC.endings):
        for row, record in arrow.records(file):
            yield row, record, f"{file}, row {row:,}"
    elif not (span and span[0]) and plain.is_array(file):
        for line, record in plain.read_array(file):
            yield line, record, f"{file}:{line}"
    else:
        for line, raw in plain.read_lines(file, span):
            where = f"{file}:{line}"
            record = plain.record_of(reader, raw, where)
            if record is not plain.SKIPPED_RECORD:
                yield line, record, where


def _ranges(file: File, size: int) -> list[tuple[int, int]]:
    """Return ranges of lines; none if the file is one JSON array."""
    return [] if plain.is_array(file) else plain.ranges(file, size)
