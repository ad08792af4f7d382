"""What is wrong with a corpus that can be seen without reading all of it: before the ranks start.

The beginnings of the files are looked at, and their sizes. Each kind of problem is one finding,
with the number of files that have it and the first of them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trainctl.config.schema import DataConfig, DataKind, OnBadText, RunConfig
from trainctl.config.text.documents import NoTextKey, Reader
from trainctl.config.text.files import (
    HEAD_BYTES,
    FoundFiles,
    TextFiles,
    endings_of,
    find,
    hint_for,
    no_text,
    nothing_in,
    split_files,
)
from trainctl.errors import Finding, Severity, TrainctlError

MISSING = "TC115"
BINARY = "TC138"
TEXT_KEY = "TC139"
FOLDER = "TC140"
SIDES = "TC141"
BAD_TEXT = "TC142"

_FILES_OPENED = 1000
"""Of one key, in order: opening more would keep a launch waiting."""
_LINES_READ = 20
"""Of each JSONL file."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """Of one file.

    Attributes:
        rule: Identifier of its finding.
        kind: What files that share a finding have in common.
        message: Naming the file.
        hint: What to do.
    """

    rule: str
    kind: str
    message: str
    hint: str


def check_text(config: RunConfig) -> list[Finding]:
    """Findings about the files that `data.paths` and `data.held_out_paths` name."""
    data = config.data
    if data.kind is not DataKind.files or data.factory is not None:
        return []
    findings: list[Finding] = []
    for key, patterns in (("paths", data.paths), ("held_out_paths", data.held_out_paths)):
        found = [(pattern, find(pattern)) for pattern in patterns]
        findings += _of_patterns(f"data.{key}", found)
        files = sorted({file for _, each in found for file in each.files})
        findings += _of_files(f"data.{key}", files, data)
    if data.paths and not any(finding.is_error for finding in findings):
        findings += _of_sides(config, split_files(data))
    return findings


def _of_patterns(key: str, found: list[tuple[str, FoundFiles]]) -> Iterator[Finding]:
    for pattern, each in found:
        if not each.files:
            rule = FOLDER if each.is_folder else MISSING
            hint = hint_for(each).replace("FOLDER", pattern.rstrip("/"))
            yield Finding(rule=rule, key=key, message=nothing_in(pattern, each), hint=hint)
        elif each.left_out:
            yield Finding(
                rule=FOLDER,
                key=key,
                message=f"{pattern} is a folder: {len(each.files):,} of its files are read, and "
                f"left out are {endings_of(each)}",
                hint=hint_for(each).replace("FOLDER", pattern.rstrip("/")),
                severity=Severity.warning,
            )


def _of_files(key: str, files: list[Path], data: DataConfig) -> Iterator[Finding]:
    """One finding for each kind of problem."""
    kinds: dict[tuple[str, str], list[_Problem]] = {}
    for file in files[:_FILES_OPENED]:
        problem = _problem(file, data)
        if problem is not None:
            kinds.setdefault((problem.rule, problem.kind), []).append(problem)
    for (rule, _), problems in kinds.items():
        others = len(problems) - 1
        more = f" (and so {others:,} more of {len(files):,} files)" if others else ""
        message, hint = problems[0].message, problems[0].hint
        yield Finding(rule=rule, key=_key_of(rule, key), message=message + more, hint=hint)


def _key_of(rule: str, key: str) -> str:
    return {TEXT_KEY: "data.text_key", BAD_TEXT: "data.on_bad_text"}.get(rule, key)


def _problem(file: Path, data: DataConfig) -> _Problem | None:
    """What is wrong with the beginning of a file."""
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        why = error.strerror or "not read"
        return _Problem(MISSING, why, f"cannot read {file}: {why}", "")
    found = no_text(head)
    if found is not None:
        kind, hint = found
        message = f"{file} is {kind}, not text"
        return _Problem(BINARY, kind, message, hint.replace("FILE", str(file)))
    look = _in_lines if file.suffix == ".jsonl" else _in_text
    bad = look(file, head, data)
    if bad is None:
        return None
    rule = TEXT_KEY if isinstance(bad, NoTextKey) else BAD_TEXT
    return _Problem(rule, bad.hint, bad.message, bad.hint)


def _in_lines(file: Path, head: bytes, data: DataConfig) -> TrainctlError | None:
    """The first problem of a JSONL file's first lines; where lines may be left out, of all."""
    lines = head.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if len(head) == HEAD_BYTES:
        lines.pop()  # it goes on
    may_skip = data.on_bad_text is OnBadText.skip
    reader = Reader(replace(data, on_bad_text=OnBadText.error) if may_skip else data)
    problems, good = [], 0
    for number, line in enumerate(lines[:_LINES_READ], 1):
        if not line.strip():
            continue
        try:
            reader.text_of_line(line.strip(), f"{file}:{number}")
            good += 1
        except TrainctlError as error:
            problems.append(error)
    return problems[0] if problems and not (may_skip and good) else None


def _in_text(file: Path, head: bytes, data: DataConfig) -> TrainctlError | None:
    if data.on_bad_text is not OnBadText.error:
        return None
    try:
        # A character may go on after the head.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        return Reader(data).problem_of(head, str(file))
    return None


def _of_sides(config: RunConfig, files: TextFiles) -> Iterator[Finding]:
    """Whether each side of the corpus has a sample in it: a text has no more tokens than bytes."""
    data, length = config.data, config.training.sequence_length
    train, held_out = _most_tokens(files.train, data), _most_tokens(files.held_out, data)
    if files.by_document:
        held_out = round(train * data.held_out_fraction)
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
    if held_out <= length and _wants_evaluation(config):
        yield Finding(
            rule=SIDES,
            key=key,
            message=f"{held_out:,} bytes are held out, less than one sample of "
            f"training.sequence_length={length:,}: no held-out loss will be known",
            hint="hold out more, or set training.evaluation_samples=0",
            severity=Severity.warning,
        )
    share = held_out / (held_out + train)
    if not data.held_out_paths and not files.by_document and share > 2 * data.held_out_fraction:
        every = len(files.train) + len(files.held_out)
        yield Finding(
            rule=SIDES,
            key=key,
            message=f"{len(files.held_out):,} of {every:,} files held out are {share:.0%} of the "
            f"text, where {data.held_out_fraction:.0%} was asked for",
            hint="name a smaller file in data.held_out_paths, or divide the text into more files",
            severity=Severity.warning,
        )


def _most_tokens(files: list[Path], data: DataConfig) -> int:
    """Bytes of the files, as far as they are read, and an end of each document."""
    size = sum(file.stat().st_size for file in files)
    return len(files) + (size if data.max_bytes is None else min(size, data.max_bytes))


def _wants_evaluation(config: RunConfig) -> bool:
    training = config.training
    return training.evaluation_samples > 0 and bool(
        config.data.held_out_fraction or config.data.held_out_paths
    )
