"""Conversations, in any of the published shapes: one conversation per document.

They are packed whole and do not attend to each other. The loss is on the assistant's tokens, unless
`data.learn` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import DataFromPaths
from trainctl.config.schema.option import option
from trainctl.errors import TrainctlError
from trainctl.options.data import DataSource, arrow, parquet
from trainctl.readers import plain
from trainctl.readers.check import FileProblem
from trainctl.readers.conversations import (
    BadConversation,
    Learn,
    Shape,
    as_text,
    conversation_of,
)
from trainctl.readers.documents import Document, Reader
from trainctl.readers.remote import File
from trainctl.readers.stream import uncompressed_name
from trainctl.readers.tables import first_problem


@dataclass
class ChatConfig(DataFromPaths):
    """Keys of conversations."""

    shape: Shape = option(
        Shape.auto,
        "Format of a conversation record: messages, prompt (and completion), alpaca or sharegpt; "
        "auto infers it from the record's keys.",
    )
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
    learn: Learn = option(
        Learn.assistant,
        "Tokens that contribute to the loss: all assistant messages, only the last one, or the "
        "whole conversation.",
    )


def read(reader: Reader, file: File, span: tuple[int, int] | None = None) -> Iterator[Document]:
    """Yield the conversations of a file, or of one of its `ranges`, in order, each as JSON."""
    assert isinstance(reader.config, ChatConfig)
    for number, record, where in records(reader, file, span):
        try:
            conversation = conversation_of(record, reader.config.shape)
        except BadConversation as bad:
            reader.apply_bad_text_policy(where, str(bad))
            continue
        text = reader.clean(as_text(conversation), where)
        if text is not None:
            yield Document(text, file, number)


def ranges(file: File, size: int) -> list[tuple[int, int]]:
    """Return the ranges of a JSONL file; empty for other files, which are read as a whole."""
    return plain.ranges(file, size)


def problem(file: File, section: ChatConfig) -> FileProblem | None:
    """Return a problem of a file's first conversations; None if there is none."""
    return first_problem(file, section, read)


def records(
    reader: Reader, file: File, span: tuple[int, int] | None
) -> Iterator[tuple[int, Any, str]]:
    """Yield each record with its line or row number, from 1, and its location as text.

    Raises:
        TrainctlError: A file is one JSON array of all records, or reading it fails.
    """
    name = uncompressed_name(file)
    if name.endswith(parquet.SPEC.endings):
        for row, record in parquet.records(file):
            yield row, record, f"{file}, row {row:,}"
    elif name.endswith(arrow.SPEC.endings):
        for row, record in arrow.records(file):
            yield row, record, f"{file}, row {row:,}"
    else:
        for line, raw in plain.read_lines(file, span):
            where = f"{file}:{line}"
            if line == 1 and not (span and span[0]) and raw.startswith(b"["):
                raise TrainctlError(
                    f"{file} is a JSON array: what is read has a record a line",
                    hint=f"jq -c '.[]' {file} > {name.removesuffix('.json')}.jsonl",
                )
            record = plain.record_of(reader, raw, where)
            if record is not plain.SKIPPED_RECORD:
                yield line, record, where


SPEC = DataSource(
    name="chat",
    keys=ChatConfig,
    build=read,
    endings=(".jsonl", *parquet.SPEC.endings, *arrow.SPEC.endings),
    choose=arrow.choose_files,
    ranges=ranges,
    counts_lines=True,
    problem=problem,
    identity=lambda section: f"chat {section.shape.value}",
    encoder="trainctl.data.chat_encoders:ChatEncoder",
)
