"""Rules about conversations."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Packing
from trainctl.errors import Finding
from trainctl.options.data import spec_of
from trainctl.plan.mixture import sources_of
from trainctl.rules.plan.draft import Draft, error, warning

_GIVEN = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "documents",
    "messages",
    "return_assistant_tokens_mask",
    "tools",
)
"""Arguments that transformers' chat rendering takes itself, or passes to every template."""


def conversations_are_whole(draft: Draft) -> Iterator[Finding]:
    """A conversation is cut at the length of a sample alone, and is what its template makes."""
    data = draft.config.data
    for name, section in sources_of(data).items():
        if not spec_of(section).encoder or data.factory is not None:
            continue
        key = f"data.sources.{name}" if data.sources else "data"
        kind = f"{key}.kind={section.kind}"
        if data.packing is not Packing.best_fit:
            yield error(
                "data.packing",
                f"data.packing={data.packing.value} with {kind} cuts conversations anywhere: an "
                "answer would be learnt without its question",
                "data.packing=best_fit",
            )
        if section.filters:
            yield error(
                f"{key}.filters",
                f"{key}.filters with {kind}: they judge running text, and would read a record as "
                "it stands in its file",
                f"leave {key}.filters out; data.dedup and data.decontaminate go by documents",
            )
        for own, value in (
            ("separator", section.separator),
            ("fim_rate", section.fim_rate),
            ("max_bytes", section.max_bytes),
        ):
            if value:
                yield error(
                    f"{key}.{own}",
                    f"{key}.{own}={value!r} with {kind}: a conversation is what its template makes "
                    "of it",
                    f"leave {key}.{own} out",
                )


def conversations_do_not_see_each_other(draft: Draft) -> Iterator[Finding]:
    """Packed conversations are masked from each other."""
    data = draft.config.data
    has_chats = any(spec_of(each).encoder for each in sources_of(data).values())
    if has_chats and data.factory is None and not data.mask_documents:
        yield warning(
            "data.mask_documents",
            "data.mask_documents=false: a conversation sees those before it in its sample",
            "data.mask_documents=true",
        )


def template_arguments_are_its_own(draft: Draft) -> Iterator[Finding]:
    """What a template is given by whoever calls it is not given to it again."""
    data = draft.config.data
    for name, section in sources_of(data).items():
        key = f"data.sources.{name}" if data.sources else "data"
        for argument in getattr(section, "template_arguments", {}):
            if argument in _GIVEN or argument.endswith("_token"):
                yield error(
                    f"{key}.template_arguments.{argument}",
                    f"{key}.template_arguments names {argument}, which the template is given "
                    "anyway",
                    "leave it out",
                )
