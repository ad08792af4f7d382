"""Rules about conversations."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Packing
from trainctl.options.data import spec_of
from trainctl.plan.mixture import sources_of
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule

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


@rule(
    "TC366",
    "data.packing",
    "*.filters",
    "*.*",
    example="recipe=tiny data=chat data.paths=[chat.jsonl] data.separator=x",
    files={"chat.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n'},
)
def conversations_are_whole(draft: Draft) -> Iterator[Problem]:
    """Conversations are packed whole, without a separator.

    A conversation is what its template makes of it, and is never cut anywhere: a stream of tokens
    with separators would be something else.

    Fix: Use data.packing=best_fit, and no data.separator.
    """
    data = draft.config.data
    for name, section in sources_of(data).items():
        if not spec_of(section).encoder or data.factory is not None:
            continue
        key = f"data.sources.{name}" if data.sources else "data"
        kind = f"{key}.kind={section.kind}"
        if data.packing is not Packing.best_fit:
            yield Problem(
                f"data.packing={data.packing.value} with {kind} cuts conversations anywhere: an "
                "answer would be learnt without its question",
                "data.packing=best_fit",
            )
        if section.filters:
            yield Problem(
                f"{key}.filters with {kind}: they judge running text, and would read a record as "
                "it stands in its file",
                f"leave {key}.filters out; data.dedup and data.decontaminate go by documents",
                key=f"{key}.filters",
            )
        for own, value in (
            ("separator", section.separator),
            ("fim_rate", section.fim_rate),
            ("max_bytes", section.max_bytes),
        ):
            if value:
                yield Problem(
                    f"{key}.{own}={value!r} with {kind}: a conversation is what its template makes "
                    "of it",
                    f"leave {key}.{own} out",
                    key=f"{key}.{own}",
                )


@rule(
    "TC368",
    "data.mask_documents",
    severity=WARNING,
    situation="`data=chat data.packing=best_fit data.mask_documents=false`",
    message="data.mask_documents=false: a conversation sees those before it in its sample",
)
def conversations_do_not_see_each_other(draft: Draft) -> Iterator[Problem]:
    """Packed conversations do not attend to each other.

    Several conversations share a sample. Without a mask each sees those before it, which it will
    not when it is used.

    Fix: Set data.mask_documents=true.
    """
    data = draft.config.data
    has_chats = any(spec_of(each).encoder for each in sources_of(data).values())
    if has_chats and data.factory is None and not data.mask_documents:
        yield Problem(
            "data.mask_documents=false: a conversation sees those before it in its sample",
            "data.mask_documents=true",
        )


@rule(
    "TC369",
    "*.template_arguments.*",
    example="recipe=tiny data=chat data.paths=[chat.jsonl] data.template_arguments={tools:[]}",
    files={"chat.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n'},
)
def template_arguments_are_its_own(draft: Draft) -> Iterator[Problem]:
    """Template arguments do not repeat what the renderer passes.

    Whoever renders a conversation gives the template its messages, its tools and the special
    tokens: given twice, a run would train on something else than the template means.

    Fix: Give only what the template itself asks for, such as enable_thinking.
    """
    data = draft.config.data
    for name, section in sources_of(data).items():
        key = f"data.sources.{name}" if data.sources else "data"
        for argument in getattr(section, "template_arguments", {}):
            if argument in _GIVEN or argument.endswith("_token"):
                yield Problem(
                    f"{key}.template_arguments names {argument}, which the template is given "
                    "anyway",
                    "leave it out",
                    key=f"{key}.template_arguments.{argument}",
                )
