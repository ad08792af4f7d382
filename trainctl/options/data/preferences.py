"""Pairs of answers to a prompt, one of them preferred: one pair per document.

A sample is one pair: both answers, each after the prompt. They do not attend to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import DataFromPaths
from trainctl.config.schema.option import option
from trainctl.options.data import DataSource, SampleKind, chat
from trainctl.readers.check import FileProblem
from trainctl.readers.conversations import BadConversation, as_text, pair_of
from trainctl.readers.documents import Document, Reader
from trainctl.readers.remote import File
from trainctl.readers.tables import first_problem


@dataclass
class PreferencesConfig(DataFromPaths):
    """Keys of preference pairs."""

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


def read(reader: Reader, file: File, span: tuple[int, int] | None = None) -> Iterator[Document]:
    """Yield the pairs of a file, or of one of its `ranges`, in order, each as JSON."""
    for number, record, where in chat.records(reader, file, span):
        try:
            pair = pair_of(record)
        except BadConversation as bad:
            reader.apply_bad_text_policy(where, str(bad))
            continue
        text = reader.clean(as_text(pair), where)
        if text is not None:
            yield Document(text, file, number)


def problem(file: File, section: PreferencesConfig) -> FileProblem | None:
    """Return a problem of a file's first pairs; None if there is none."""
    return first_problem(file, section, read)


SPEC = DataSource(
    name="preferences",
    keys=PreferencesConfig,
    build=read,
    endings=chat.SPEC.endings,
    choose=chat.SPEC.choose,
    ranges=chat.ranges,
    counts_lines=True,
    problem=problem,
    identity=lambda section: "preferences",
    encoder="trainctl.data.chat_encoders:PreferenceEncoder",
    gives=SampleKind.pairs,
)
