"""Checks of the files of filters and held-out sets before a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from trainctl.config.quality import filters_of, held_out_sections
from trainctl.config.reading import special_file_type
from trainctl.config.registry import load
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.readers.files import find, hint_for, no_files_message, split_files
from trainctl.readers.stream import uncompressed_name

MISSING, WEB_RULES = "TC115", "TC359"

WEB_FILTERS = ("c4", "fineweb", "gopher_quality", "gopher_repetition")
"""Filters whose rules were designed for web pages."""

CODE = frozenset(
    f".{name}"
    for name in (
        *("c", "cc", "cpp", "cs", "cu", "go", "h", "hpp", "java", "jl", "js", "kt", "lua", "php"),
        *("pl", "py", "r", "rb", "rs", "scala", "sh", "sql", "swift", "ts"),
    )
)
"""File endings of source code."""


def check_choice(config: RunConfig) -> Iterator[Finding]:
    """Find filter lists and held-out sets without a file, and web filters applied to code."""
    data = config.data
    if data.factory is not None:
        return
    for section in held_out_sections(data):
        yield from _missing(section)
    sources: dict[str, Any] = dict(data.sources) or {"": data}
    for name, section in sources.items():
        key = f"data.sources.{name}.filters" if name else "data.filters"
        filters = filters_of(section)
        for kind, keys in filters.items():
            for setting in load("filter", kind).settings:
                path = getattr(keys, setting) if setting == "file" else ""
                file = Path(path).expanduser()
                special = special_file_type(file)
                if path and (special or not file.is_file()):
                    what = f"is {special}, no regular file" if special else "does not exist"
                    where = f"{key}.{kind}.{setting}"
                    yield Finding(rule=MISSING, key=where, message=f"{path} {what}")
        made_for_web = [kind for kind in filters if kind in WEB_FILTERS]
        if made_for_web:
            yield from _of_code(f"{key}.{made_for_web[0]}", section, made_for_web)


def _missing(section: Any) -> Iterator[Finding]:
    (path,) = section.paths
    spec = load("data", section.kind)
    try:
        found = find(path, spec.endings, spec.choose)
    except TrainctlError as error:
        yield Finding(
            rule=MISSING,
            key="data.decontaminate",
            message=error.message,
            hint=error.hint,
            exit_code=error.exit_code,
        )
        return
    if not found.files:
        yield Finding(
            rule=MISSING,
            key="data.decontaminate",
            message=no_files_message(path, found, spec.endings),
            hint=hint_for(found),
        )


def _of_code(key: str, section: Any, kinds: list[str]) -> Iterator[Finding]:
    try:
        files = split_files(section).train
    except TrainctlError:
        return  # reported by the check of the files
    endings = Counter(PurePosixPath(uncompressed_name(file)).suffix.lower() for file in files)
    code = {ending: count for ending, count in endings.items() if ending in CODE}
    if 2 * sum(code.values()) > len(files):
        ending, count = max(code.items(), key=lambda each: each[1])
        yield Finding(
            rule=WEB_RULES,
            key=key,
            message=f"{' and '.join(kinds)} {'is' if len(kinds) == 1 else 'are'} for pages of the "
            f"web, and {count:,} of {len(files):,} files end in {ending}: nearly all code goes",
            hint="give code a source of its own, without them",
            severity=Severity.warning,
        )
