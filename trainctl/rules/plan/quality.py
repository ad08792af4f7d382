"""Rules about the choice of documents: filters, deduplication, decontamination."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainctl.config.quality import HELD_OUT, filters_of, has_quality_rules, held_out_sections
from trainctl.config.registry import load
from trainctl.config.schema import DataConfig, DataFromPaths, Dedup
from trainctl.errors import Finding
from trainctl.options.data import spec_of
from trainctl.options.filter import Filter
from trainctl.plan.mixture import SINGLE_SOURCE, sources_of
from trainctl.rules.plan.draft import Draft, error

LEAST_JACCARD = 0.3
"""Below it, MinHash candidates are nearly all pairs of documents that share anything."""


def copies_can_be_found(draft: Draft) -> Iterator[Finding]:
    """MinHash finds what is nearly the same, not what has little in common."""
    data = draft.config.data
    threshold = data.dedup_threshold
    if data.dedup is Dedup.minhash and threshold is not None and threshold < LEAST_JACCARD:
        yield error(
            "data.dedup_threshold",
            f"data.dedup_threshold={threshold:g} is no likeness that data.dedup=minhash could find",
            f"nearest legal: {LEAST_JACCARD:g}; 0.7 to 0.9 are usual",
        )


def precedence_knows_its_sources(draft: Draft) -> Iterator[Finding]:
    """Each name is a source's."""
    data = draft.config.data
    unknown = [name for name in data.dedup_precedence if name not in data.sources]
    if unknown and data.sources:
        yield error(
            "data.dedup_precedence",
            f"there is no source {', '.join(unknown)}",
            f"data.sources has {', '.join(data.sources)}",
        )


def contamination_needs_held_out_text(draft: Draft) -> Iterator[Finding]:
    """Without anything held out there are no passages of it."""
    data = draft.config.data
    if HELD_OUT in data.decontaminate and not any(map(_holds_out, sources_of(data).values())):
        yield error(
            "data.decontaminate",
            f"data.decontaminate names {HELD_OUT}, and nothing is held out",
            "data.held_out_fraction=0.05, data.held_out_paths=[...], or leave it out",
        )


def filters_keep_something(draft: Draft) -> Iterator[Finding]:
    """Each filter has what it measures with, and no bound below above the one above."""
    for where, section in _sections(draft.config.data):
        for name, keys in filters_of(section).items():
            spec = load("filter", name)
            key = f"{where}.filters.{name}"
            if name == "urls":
                yield error(
                    key,
                    f"{key} needs addresses of documents, which no data gives yet",
                    "leave it out",
                )
            for setting in spec.settings:
                if getattr(keys, setting) in ("", None):
                    yield error(
                        f"{key}.{setting}", f"{key} needs {setting}", f"{key}.{setting}=VALUE"
                    )
            yield from _crossed(key, spec, keys)


def chosen_documents_are_whole(draft: Draft) -> Iterator[Finding]:
    """A text that is cut, or a function's, is not looked at document by document."""
    data = draft.config.data
    if not has_quality_rules(data):
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
        yield error(
            asked,
            f"{asked} looks at files, and data.factory={data.factory} gives the texts",
            "have the function leave documents out",
        )
    for section in held_out_sections(data):
        if spec_of(section).is_tokenized and isinstance(section, DataFromPaths):
            yield error(
                "data.decontaminate",
                f"data.decontaminate looks for texts, and {section.paths[0]} has ids",
                "name the texts that they were made of",
            )
    for where, section in _sections(data):
        has_ids = spec_of(section).is_tokenized or spec_of(section).is_prepared
        if has_ids and (section.filters or not data.sources):
            key = f"{where}.filters" if section.filters else asked
            yield error(
                key,
                f"{key} looks at texts, and {where}.kind={section.kind} has none",
                "leave it out, or name the texts that the ids were made of",
            )
        if section.max_bytes is not None:
            yield error(
                f"{where}.max_bytes",
                f"{where}.max_bytes={section.max_bytes} cuts a document, and {asked} looks at "
                "whole ones",
                f"leave {where}.max_bytes out, or {asked}",
            )


def _sections(data: DataConfig) -> Iterator[tuple[str, DataConfig]]:
    for name, section in sources_of(data).items():
        yield (
            ("data" if name == SINGLE_SOURCE and not data.sources else f"data.sources.{name}"),
            section,
        )


def _holds_out(section: DataConfig) -> bool:
    named = isinstance(section, DataFromPaths) and section.held_out_paths
    return bool(named or section.held_out_fraction)


def _crossed(key: str, spec: Filter, keys: Any) -> Iterator[Finding]:
    for low in spec.bounds:
        for high in spec.bounds:
            if low.is_least and not high.is_least and low.statistic == high.statistic:
                least, most = getattr(keys, low.key), getattr(keys, high.key)
                if least is not None and most is not None and least > most:
                    yield error(
                        f"{key}.{low.key}",
                        f"{key}.{low.key}={least:g} is above {high.key}={most:g}: no document is "
                        "left",
                        f"at most {most:g}",
                    )
