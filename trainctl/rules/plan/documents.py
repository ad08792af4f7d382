"""Rules about documents: conversations, filters, deduplication, decontamination."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainctl.config.registry import load_spec
from trainctl.config.schema import DataConfig, DataFromPaths, Dedup, Packing
from trainctl.config.suggest import nearest_names, words
from trainctl.options.data import spec_of
from trainctl.options.data.prompts import PromptsConfig
from trainctl.options.filter import Filter
from trainctl.plans.mixture import keyed_sources, sources_of
from trainctl.readers.conversations import NAMES
from trainctl.readers.quality import HELD_OUT, decontamination_sections, filters_of
from trainctl.rules.plan.data import TEXT, TWO_SOURCES
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule

LEAST_JACCARD = 0.3
"""Below it, MinHash candidates are nearly all pairs of documents that share anything."""


@rule(
    "TC353",
    "data.dedup_threshold",
    example="recipe=tiny data.dedup=minhash data.dedup_threshold=0.1",
)
def copies_can_be_found(draft: Draft) -> Iterator[Problem]:
    """The similarity threshold is one that MinHash can detect.

    MinHash finds near copies. Below a likeness of 0.3 the bands that it sorts documents into hold
    nearly everything, and what it would drop is not a copy.

    Fix: Choose 0.7 to 0.9.
    """
    data = draft.config.data
    threshold = data.dedup_threshold
    if data.dedup is Dedup.minhash and threshold is not None and threshold < LEAST_JACCARD:
        yield Problem(
            f"data.dedup_threshold={threshold:g} is no likeness that data.dedup=minhash could find",
            f"nearest legal: {LEAST_JACCARD:g}; 0.7 to 0.9 are usual",
        )


@rule(
    "TC354",
    "data.dedup_precedence",
    example=f"recipe=tiny {TWO_SOURCES} data.dedup=exact data.dedup_precedence=[prsoe]",
    files=TEXT,
)
def precedence_names_existing_sources(draft: Draft) -> Iterator[Problem]:
    """data.dedup_precedence names existing sources.

    Of copies in several sources the one in the first of data.dedup_precedence stays.

    Fix: Use names of data.sources.
    """
    data = draft.config.data
    unknown = [name for name in data.dedup_precedence if name not in data.sources]
    if unknown and data.sources:
        yield Problem(
            f"there is no source {', '.join(unknown)}",
            f"data.sources has {', '.join(data.sources)}",
        )


@rule(
    "TC555",
    "data.columns",
    "data.sources.*.columns",
    example="recipe=sft-tiny 'data.columns={mesages: dialog}'",
)
def columns_are_names_that_are_read(draft: Draft) -> Iterator[Problem]:
    """data.columns has names that records are read by.

    A name that no record is read by has no effect: what it stands for would be missing.

    Fix: Put the name that trainctl reads before the colon, and the record's own key behind it.
    """
    for where, section in keyed_sources(draft.config.data).items():
        columns: dict[str, str] = getattr(section, "columns", {})
        unknown = [each for each in columns if each not in NAMES]
        if unknown and not isinstance(section, PromptsConfig):  # rewards read other names
            near = nearest_names(unknown[0], sorted(NAMES), count=1) or ["messages"]
            own = columns[unknown[0]]
            yield Problem(
                f"{where}.columns has {unknown[0]!r}, and no record is read by that name",
                f"{where}.columns={{{near[0]}: {own}}}; known are {', '.join(sorted(NAMES))}",
                key=f"{where}.columns",
            )


@rule(
    "TC355",
    "data.decontaminate",
    example="recipe=tiny data.decontaminate=[held_out] data.held_out_fraction=0",
)
def contamination_needs_held_out_text(draft: Draft) -> Iterator[Problem]:
    """Decontamination against held-out text has held-out text.

    Decontamination against held-out text needs some.

    Fix: Set data.held_out_fraction above 0, or data.held_out_paths.
    """
    data = draft.config.data
    if HELD_OUT in data.decontaminate and not any(map(_holds_out, sources_of(data).values())):
        yield Problem(
            f"data.decontaminate names {HELD_OUT}, and nothing is held out",
            "data.held_out_fraction=0.05, data.held_out_paths=[...], or leave it out",
        )


@rule(
    "TC356", "*.filters.*", "*.filters.*.*", "*.*", example="recipe=tiny 'data.filters={words: {}}'"
)
def filters_keep_something(draft: Draft) -> Iterator[Problem]:
    """Each filter has its settings, and no lower bound above its upper bound.

    A filter without what it measures with, or with a lowest value above its highest, keeps
    everything or nothing.

    Fix: Set the key that the message names.
    """
    for where, section in keyed_sources(draft.config.data).items():
        for name, keys in filters_of(section).items():
            spec = load_spec("filter", name)
            key = f"{where}.filters.{name}"
            if name == "urls":
                yield Problem(
                    f"{key} needs addresses of documents, which no data gives yet",
                    "leave it out",
                    key=key,
                )
            for setting in spec.settings:
                if getattr(keys, setting) in ("", None):
                    yield Problem(
                        f"{key} needs {setting}", f"{key}.{setting}=VALUE", key=f"{key}.{setting}"
                    )
            yield from _crossed(key, spec, keys)


@rule(
    "TC357",
    "data.decontaminate",
    "data.*",
    example="recipe=tiny data.max_bytes=100 data.dedup=exact",
)
def chosen_documents_are_whole(draft: Draft) -> Iterator[Problem]:
    """Documents are deduplicated and filtered whole, as text that trainctl reads.

    Copies and passages are looked for in whole documents of text that trainctl reads itself.

    Fix: Leave data.max_bytes out, or clean the text before it is tokenized.
    """
    data = draft.config.data
    if not data.has_quality_rules:
        return
    asked = next(
        key
        for key, is_set in (
            ("data.dedup", data.dedup is not Dedup.none),
            ("data.decontaminate", data.decontaminate),
            ("data.filters", True),
        )
        if is_set
    )
    if data.factory is not None:
        yield Problem(
            f"{asked} looks at files, and data.factory={data.factory} gives the texts",
            "have the function leave documents out",
            key=asked,
        )
    for section in decontamination_sections(data):
        if spec_of(section).is_tokenized and isinstance(section, DataFromPaths):
            yield Problem(
                f"data.decontaminate looks for texts, and {section.paths[0]} has ids",
                "name the texts that they were made of",
            )
    for where, section in keyed_sources(data).items():
        has_ids = spec_of(section).is_tokenized or spec_of(section).is_prepared
        if has_ids and (section.filters or not data.sources):
            key = f"{where}.filters" if section.filters else asked
            yield Problem(
                f"{key} looks at texts, and {where}.kind={section.kind} has none",
                "leave it out, or name the texts that the ids were made of",
                key=key,
            )
        if section.max_bytes is not None:
            yield Problem(
                f"{where}.max_bytes={section.max_bytes} cuts a document, and {asked} looks at "
                "whole ones",
                f"leave {where}.max_bytes out, or {asked}",
                key=f"{where}.max_bytes",
            )


def _holds_out(section: DataConfig) -> bool:
    named = isinstance(section, DataFromPaths) and section.held_out_paths
    return bool(named or section.held_out_fraction)


def _crossed(key: str, spec: Filter, keys: Any) -> Iterator[Problem]:
    for low in spec.bounds:
        for high in spec.bounds:
            if low.is_least and not high.is_least and low.statistic == high.statistic:
                least, most = getattr(keys, low.key), getattr(keys, high.key)
                if least is not None and most is not None and least > most:
                    yield Problem(
                        f"{key}.{low.key}={least:g} is above {high.key}={most:g}: no document is "
                        "left",
                        f"at most {most:g}",
                        key=f"{key}.{low.key}",
                    )


_RESERVED_ARGUMENTS = words(
    """
    add_generation_prompt chat_template continue_final_message conversations documents messages
    return_assistant_tokens_mask tools
    """
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
    for key, section in keyed_sources(data).items():
        if not spec_of(section).encoder or data.factory is not None:
            continue
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
    for key, section in keyed_sources(data).items():
        for argument in getattr(section, "template_arguments", {}):
            if argument in _RESERVED_ARGUMENTS or argument.endswith("_token"):
                yield Problem(
                    f"{key}.template_arguments names {argument}, which the template is given "
                    "anyway",
                    "leave it out",
                    key=f"{key}.template_arguments.{argument}",
                )
