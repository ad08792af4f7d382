"""Check before a start that chat templates write the fields that conversations have. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from trainctl.config.registry import load_spec
from trainctl.config.schema import OnBadText, RunConfig
from trainctl.data.template_rendering import CALLS, REASONING, has_fields
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.options.data._records import TemplateConfig
from trainctl.plans.mixture import keyed_sources
from trainctl.readers.conversations import ANSWERS, Message
from trainctl.readers.documents import Reader
from trainctl.readers.files import split_files

CALLS_LEFT_OUT, FIELD_LEFT_OUT = "TC550", "TC551"

_READ = 1000
"""Records read of each source: more would delay a launch."""

_RENDERED = 100
"""Conversations rendered of those, as a text takes up to ten milliseconds."""


def check_templates(config: RunConfig) -> list[Finding]:
    """Return a finding for each kind of field that a template leaves out of the first records.

    Files that cannot be read, and a missing template, are reported by other checks.
    """
    findings: list[Finding] = []
    if config.trains_itself and config.data.factory is None:
        for key, section in keyed_sources(config.data).items():
            if isinstance(section, TemplateConfig):
                with suppress(TrainctlError, OSError):
                    findings += _check_source(key, section, config)
    return findings


def _check_source(key: str, section: TemplateConfig, config: RunConfig) -> Iterator[Finding]:
    read, counts = _count_left_out(section, config)
    for kind, count in counts.items():
        is_error = kind == CALLS and section.on_bad_text is not OnBadText.skip
        hint = f"{key}.chat_template=FILE.jinja, with a template that writes them"
        yield Finding(
            rule=CALLS_LEFT_OUT if kind == CALLS else FIELD_LEFT_OUT,
            key=f"{key}.chat_template",
            message=f"{count:,} of the first {read:,} records have {kind} that the chat template "
            + ("leaves out" if is_error or kind != CALLS else "leaves out, and are skipped"),
            hint=hint if kind != REASONING else f"{hint}; without one it is not learnt",
            severity=Severity.error if is_error else Severity.warning,
        )


def _count_left_out(section: TemplateConfig, config: RunConfig) -> tuple[int, Counter[str]]:
    """Return the number of records read, and how many lose a field, by its kind."""
    from trainctl.data.chat_template import ChatTemplate  # imports numpy, which few plans need

    file = load_spec("tokenizer", config.tokenizer.kind).file
    template: ChatTemplate | None = None
    counts: Counter[str] = Counter()
    read = rendered = 0
    for document in islice(Reader(section).documents(split_files(section).train), _READ):
        read += 1
        kinds: set[str] = set()
        for messages, tools in _conversations(json.loads(document.text)):
            if has_fields(messages, tools):
                rendered += 1
                template = template or ChatTemplate.of(
                    file(config.tokenizer), section.chat_template, section.template_arguments
                )
                kinds |= template.left_out(messages, tools)
        counts.update(kinds)
        if rendered >= _RENDERED:
            break
    return read, counts


def _conversations(record: Mapping[str, Any]) -> Iterator[tuple[list[Message], list[Any]]]:
    """Yield the conversations of a record, with the schemas of its tools."""
    tools = record.get("tools") or []
    before = record.get("messages") or record.get("prompt")
    if isinstance(before, list):
        answers = [record[key] for key in (*ANSWERS, "completion") if key in record]
        for answer in answers or [[]]:
            yield [*before, *answer], tools
