"""Checks of a corpus before the ranks start, without reading all of it.

They look at the sizes and beginnings of files. Each kind of problem is one finding, with the number
of files that have it and the first of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

from trainctl.config.reading import special_file_type
from trainctl.config.registry import load_spec
from trainctl.config.schema import DataConfig, DataFromPaths, Dedup, RunConfig
from trainctl.errors import ExitCode, Finding, Severity, TrainctlError
from trainctl.models.local_path import is_file, local_path
from trainctl.models.tokenizer_files import TokenizerFacts
from trainctl.readers.documents import warn_if_stalled
from trainctl.readers.files import (
    FoundFiles,
    TextFiles,
    describe_endings,
    file_sort_key,
    find_files,
    hint_for,
    no_files_message,
    split_files,
)
from trainctl.readers.quality import HELD_OUT, decontamination_sections, filters_of
from trainctl.readers.remote import File
from trainctl.readers.stream import DamagedFile, is_compressed, uncompressed_name

UNNAMED = "TC074"
MISSING = "TC115"
BINARY = "TC138"
TEXT_KEY = "TC139"
FOLDER = "TC140"
SIDES = "TC141"
BAD_TEXT = "TC142"
OVERLAP = "TC350"
UNFIT_IDS = "TC360"

_FILES_OPENED = 1000
"""Maximum local files opened per key, in order: more would delay a launch."""
_REMOTE_OPENED = 20
"""Maximum remote files opened per key."""


@dataclass(frozen=True, slots=True)
class FileProblem:
    """A problem of one file."""

    rule: str
    kind: str
    """Kind of problem: files with the same kind share a finding."""
    message: str
    hint: str
    key: str = ""
    """Key to change; empty for the key that names the file."""
    exit_code: ExitCode = ExitCode.bad_input


Look = Callable[[File, Any], FileProblem | None]
"""Function that returns the problem of a file under its section, judged by its beginning. It
raises OSError or TrainctlError if the file cannot be read.
"""


def check_text(config: RunConfig) -> list[Finding]:
    """Return findings about the files of `data.paths` and `data.held_out_paths`, of each source."""
    if config.data.sources:
        return _check_sources(config)
    data = config.data
    if not isinstance(data, DataFromPaths) or data.factory is not None:
        return []
    spec = load_spec("data", data.kind)
    findings: list[Finding] = []
    if not data.paths:
        message = f"data.kind={data.kind} needs data.paths"
        hint = f'data.paths=["/path/to/*{spec.endings[0]}"]'
        findings.append(Finding(rule=UNNAMED, key="data.paths", message=message, hint=hint))
    for key, patterns in (("paths", data.paths), ("held_out_paths", data.held_out_paths)):
        found = []
        for pattern in patterns:
            try:
                found.append((pattern, find_files(pattern, spec.endings, spec.choose)))
            except TrainctlError as error:  # no server answers
                findings.append(_not_read(f"data.{key}", error))
        findings += _check_patterns(f"data.{key}", found, spec.endings)
        files = sorted({file for _, each in found for file in each.files}, key=file_sort_key)
        look = (
            partial(spec.problem, _tokenizer_facts(config)) if spec.is_tokenized else spec.problem
        )
        if look is not None:
            findings += _check_files(f"data.{key}", files, data, look)
    has_error = any(finding.is_error for finding in findings)
    if data.paths and not has_error and spec.is_plain:
        split = split_files(data)
        of_sides = [*_check_split_sizes(config, data, split)]
        if of_sides and not any(is_compressed(file) for file in (*split.train, *split.held_out)):
            findings += of_sides
    return findings


def _tokenizer_facts(config: RunConfig) -> TokenizerFacts | None:
    """Return the facts of the tokenizer; None if its file is missing (another finding)."""
    try:
        facts: TokenizerFacts = load_spec("tokenizer", config.tokenizer.kind).facts(
            config.tokenizer
        )
        return facts
    except (TrainctlError, OSError):
        return None


def _check_sources(config: RunConfig) -> list[Finding]:
    """Return the findings of each source, under its own keys, and overlaps between sources."""
    found = [
        replace(
            finding,
            key=with_source_keys(name, section, finding.key),
            message=with_source_keys(name, section, finding.message),
            hint=with_source_keys(name, section, finding.hint),
        )
        for name, section in config.data.sources.items()
        for finding in check_text(replace(config, data=cast(DataConfig, section)))
    ]
    return found if any(each.is_error for each in found) else [*found, *_find_overlaps(config.data)]


def _find_overlaps(data: DataConfig) -> Iterator[Finding]:
    """Find files that one source holds out and another trains on.

    Deduplication and decontamination may still drop their texts, so nothing is reported with them.
    """
    if data.dedup is not Dedup.none or HELD_OUT in data.decontaminate:
        return
    sides = {
        name: (cast(DataConfig, section), split_files(cast(DataConfig, section)))
        for name, section in data.sources.items()
        if not load_spec("data", section.kind).is_prepared
    }
    for name, (section, files) in sides.items():
        for other, (held_out_by, others) in sides.items():
            held_out = {*others.held_out}
            if others.by_document and not _holds_out_as_much(section, files, held_out_by):
                held_out |= {*others.train}
            both = sorted({*files.train} & held_out, key=file_sort_key)
            if both and name != other:
                more = f" and {len(both) - 1:,} more" if len(both) > 1 else ""
                yield Finding(
                    rule=OVERLAP,
                    key=f"data.sources.{name}.held_out_fraction",
                    message=f"data.sources.{name} trains on {both[0]}{more}, "
                    + ("of which" if others.by_document else "which")
                    + f" data.sources.{other} holds out"
                    + (" other documents" if others.by_document else ""),
                    hint="data.decontaminate=[held_out] leaves them out; or the same share of the "
                    "same files in both",
                )


def _holds_out_as_much(section: DataConfig, files: TextFiles, other: DataConfig) -> bool:
    """Return True if a source holds out each document of its files that `other` holds out."""
    has_same_seed = section.held_out_seed == other.held_out_seed
    is_as_large = section.held_out_fraction >= other.held_out_fraction
    return files.by_document and has_same_seed and is_as_large


def with_source_keys(name: str, section: Any, text: str) -> str:
    """Replace keys of `data` in a text by the keys of a source.

    Names of files may look like keys, such as `data.jsonl`.
    """
    names = "|".join(field.name for field in fields(section))
    return re.sub(rf"(?<![\w./-])data\.(?=(?:{names})\b)", f"data.sources.{name}.", text)


def _check_patterns(
    key: str, found: list[tuple[str, FoundFiles]], endings: Sequence[str]
) -> Iterator[Finding]:
    for pattern, each in found:
        if not each.files:
            rule = FOLDER if each.is_folder else MISSING
            hint = hint_for(each).replace("FOLDER", pattern.rstrip("/"))
            yield Finding(
                rule=rule, key=key, message=no_files_message(pattern, each, endings), hint=hint
            )
        elif each.left_out:
            yield Finding(
                rule=FOLDER,
                key=key,
                message=f"{pattern} is a folder: {len(each.files):,} of its files are read, and "
                f"left out are {describe_endings(each)}",
                hint=hint_for(each).replace("FOLDER", pattern.rstrip("/")),
                severity=Severity.warning,
            )


def _not_read(key: str, error: TrainctlError) -> Finding:
    return Finding(
        rule=MISSING,
        key=key,
        message=error.message,
        hint=error.hint,
        exit_code=error.exit_code,
    )


def _check_files(key: str, files: list[File], data: DataConfig, look: Look) -> Iterator[Finding]:
    """Yield one finding for each kind of problem."""
    kinds: dict[tuple[str, str], list[FileProblem]] = {}
    here = [file for file in files if isinstance(file, Path)]
    there = files[len(here) :]
    for file in here[:_FILES_OPENED] + there[:_REMOTE_OPENED]:
        problem = _read_problem(file, data, look)
        if problem is not None:
            kinds.setdefault((problem.rule, problem.kind), []).append(problem)
    for (rule, _), problems in kinds.items():
        first, others = problems[0], len(problems) - 1
        more = f" (and so {others:,} more of {len(files):,} files)" if others else ""
        message = first.message + more
        yield Finding(
            rule=rule,
            key=first.key or key,
            message=message,
            hint=first.hint,
            exit_code=first.exit_code,
        )


def _read_problem(file: File, data: DataConfig, look: Look) -> FileProblem | None:
    try:
        with warn_if_stalled(file):
            return look(file, data)
    except OSError as error:
        why = error.strerror or "not read"
        return FileProblem(MISSING, why, f"cannot read {file}: {why}", "")
    except DamagedFile as error:
        return FileProblem(BINARY, error.hint, error.message, error.hint)
    except TrainctlError as error:  # a missing package, or no answer
        return FileProblem(
            MISSING, error.hint, error.message, error.hint, exit_code=error.exit_code
        )


def _check_split_sizes(
    config: RunConfig, data: DataFromPaths, files: TextFiles
) -> Iterator[Finding]:
    """Find a side of the corpus with less than one sample, and a held-out side that is too large.

    Sizes are upper bounds: a text has no more tokens than bytes.
    """
    length = config.training.sequence_length
    train, held_out = _max_tokens(files.train, data), _max_tokens(files.held_out, data)
    if files.by_document:
        held_out = max(round(train * data.held_out_fraction), _smallest_document(data, files))
    if train <= length:
        what = "every file is held out" if not files.train else f"{train:,} bytes to train on"
        yield Finding(
            rule=SIDES,
            key="data.paths" if files.train else "data.held_out_paths",
            message=f"{what}: less than one sample of training.sequence_length={length:,}",
            hint="add text to data.paths, or shorten the sequence"
            if files.train
            else "name fewer of them in data.held_out_paths",
        )
        return
    key = "data.held_out_paths" if data.held_out_paths else "data.held_out_fraction"
    wants_loss = config.training.evaluation_samples > 0
    wants_loss &= bool(data.held_out_fraction or data.held_out_paths)
    if held_out <= length and wants_loss:
        yield Finding(
            rule=SIDES,
            key=key,
            message=f"{held_out:,} bytes are held out, less than one sample of "
            f"training.sequence_length={length:,}: no held-out loss will be known",
            hint="hold out more, or set training.evaluation_samples=0",
            severity=Severity.warning,
        )
    share = held_out / (train if files.by_document else held_out + train)
    if not data.held_out_paths and share > 2 * data.held_out_fraction:
        every = len(files.train) + len(files.held_out)
        yield Finding(
            rule=SIDES,
            key=key,
            message=f"{len(files.held_out) or 1:,} of {every:,} files held out are {share:.0%} of "
            f"the text, where {data.held_out_fraction:.0%} was asked for",
            hint="name a smaller file in data.held_out_paths, or divide the text into more files",
            severity=Severity.warning,
        )


def _smallest_document(data: DataConfig, files: TextFiles) -> int:
    """Return the bytes of the smallest of several files that are one document each, else 0: at
    least one document is held out.
    """
    has_lines = any(uncompressed_name(file).endswith(".jsonl") for file in files.train)
    if has_lines or len(files.train) < 2 or load_spec("data", data.kind).places is None:
        return 0
    return min(file.stat().st_size for file in files.train)


def _max_tokens(files: list[File], data: DataConfig) -> int:
    """Return an upper bound of tokens: bytes up to `data.max_bytes`, and one for each file."""
    size = sum(file.stat().st_size for file in files)
    return len(files) + (size if data.max_bytes is None else min(size, data.max_bytes))


WEB_RULES = "TC359"

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


def check_quality_inputs(config: RunConfig) -> Iterator[Finding]:
    """Find filter lists and held-out sets without a file, and web filters applied to code."""
    data = config.data
    if data.factory is not None:
        return
    for section in decontamination_sections(data):
        yield from _check_held_out_set(section)
    sources: dict[str, Any] = dict(data.sources) or {"": data}
    for name, section in sources.items():
        key = f"data.sources.{name}.filters" if name else "data.filters"
        filters = filters_of(section)
        for kind, keys in filters.items():
            for setting in load_spec("filter", kind).settings:
                path = getattr(keys, setting) if setting == "file" else ""
                file = local_path(path)
                special = special_file_type(file)
                if path and (special or not is_file(file)):
                    what = f"is {special}, no regular file" if special else "does not exist"
                    where = f"{key}.{kind}.{setting}"
                    yield Finding(rule=MISSING, key=where, message=f"{path} {what}")
        made_for_web = [kind for kind in filters if kind in WEB_FILTERS]
        if made_for_web:
            yield from _check_code_filters(f"{key}.{made_for_web[0]}", section, made_for_web)


def _check_held_out_set(section: Any) -> Iterator[Finding]:
    (path,) = section.paths
    spec = load_spec("data", section.kind)
    try:
        found = find_files(path, spec.endings, spec.choose)
    except TrainctlError as error:
        yield _not_read("data.decontaminate", error)
        return
    if not found.files:
        yield Finding(
            rule=MISSING,
            key="data.decontaminate",
            message=no_files_message(path, found, spec.endings),
            hint=hint_for(found),
        )


def _check_code_filters(key: str, section: Any, kinds: list[str]) -> Iterator[Finding]:
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
