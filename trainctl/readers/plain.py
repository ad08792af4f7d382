"""Text and JSONL files: their documents, and a check of their beginning.

A file that ends in `.jsonl` has a JSON object with a text on each line; any other file is one
document. Either may be compressed by gzip, bzip2, xz or zstd, and then has both endings
(`.jsonl.zst`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from trainctl.config.schema import DataConfig, DataFromRecords, OnBadText
from trainctl.config.suggest import nearest_names
from trainctl.errors import TrainctlError
from trainctl.readers.check import BAD_TEXT, BINARY, TEXT_KEY, FileProblem
from trainctl.readers.documents import REPLACEMENT, Document, Reader
from trainctl.readers.files import HEAD_BYTES, binary_format
from trainctl.readers.remote import File
from trainctl.readers.stream import is_compressed, open_decompressed, read_head, uncompressed_name

_KEYS_SHOWN = 6
_LINES_READ = 20
"""Lines of each JSONL file that are read before the start."""
_BOM = codecs.BOM_UTF8
_ARRAY_BYTES = 1 << 20
"""Bytes of a JSON array that are read at once."""
_LONGEST_TOKEN = 16
"""Characters of a literal or an escape that the end of what was read may cut."""
_WHITE_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
SKIPPED_RECORD = object()
"""Value of a record that is left out. None is the value of JSON's null."""


class NoTextKey(TrainctlError):
    """A JSONL line without a text under `data.text_key`."""

    def __init__(self, where: str, text_key: str, record: dict[str, object]) -> None:
        texts = {key: value for key, value in record.items() if isinstance(value, str)}
        # A typing error, or another name: the key with the longest text is the likeliest.
        keys = sorted(texts, key=lambda key: len(texts[key]), reverse=True)
        meant = nearest_names(text_key, keys, count=1) or keys[:1]
        has = f"it has texts under {_keys_in_words(keys)}"
        hint = f"data.text_key={meant[0]}" if meant else "write the text under one key"
        if not keys:
            has = (
                f"its keys are {_keys_in_words(list(record))}, with no text"
                if record
                else "it is empty"
            )
        super().__init__(f"{where}: no text under {text_key!r}: {has}", hint=hint)


def read(reader: Reader, file: File, span: tuple[int, int] | None = None) -> Iterator[Document]:
    """Return the documents of a file, or of one of its `ranges`, in order.

    Within a range, lines are counted from its start.
    """
    return _read_lines(reader, file, span) if _has_lines(file) else _read_whole(reader, file)


def ranges(file: File, size: int) -> list[tuple[int, int]]:
    """Return byte ranges of whole lines, in order, each of `size` bytes or slightly more.

    The file is read only around the ends of ranges. A file that is not JSONL is one document and
    has no ranges, nor has a compressed file, which can only be read from its beginning.
    """
    if not _has_lines(file) or is_compressed(file):
        return []
    found = []
    start, length = 0, file.stat().st_size
    with file.open("rb") as stream:
        while start < length:
            stream.seek(min(start + size, length) - 1)
            stream.readline()
            found.append((start, stream.tell()))
            start = stream.tell()
    return found


def line_numbers(file: File) -> list[int | None]:
    """Return the line numbers of a JSONL file's documents; [None] for any other file."""
    if not _has_lines(file):
        return [None]
    with open_decompressed(file) as lines:
        return [number for number, line in enumerate(lines, 1) if line.strip()]


def _has_lines(file: File) -> bool:
    return uncompressed_name(file).endswith(".jsonl")


def problem(file: File, config: DataConfig) -> FileProblem | None:
    """Return the problem at the beginning of a file, if any."""
    head = read_head(file, HEAD_BYTES)
    found = binary_format(head)
    if found is not None:
        kind, hint = found
        message = f"{file} is {kind}, not text"
        return FileProblem(BINARY, kind, message, hint.replace("FILE", str(file)))
    look = _first_line_problem if _has_lines(file) else _encoding_problem
    bad = look(file, head, config)
    if bad is None:
        return None
    rule, key = (TEXT_KEY, "text_key") if isinstance(bad, NoTextKey) else (BAD_TEXT, "on_bad_text")
    return FileProblem(rule, bad.hint, bad.message, bad.hint, f"data.{key}")


def _read_whole(reader: Reader, file: File) -> Iterator[Document]:
    with open_decompressed(file) as stream:
        raw = stream.read()
    _refuse_binary(file, raw[:HEAD_BYTES])
    text = reader.decoded(raw.removeprefix(_BOM), str(file), whole=True)
    if text is not None and "\x00" in text:
        where = f"{file}:{text.count(chr(10), 0, text.index(chr(0))) + 1}"
        text = reader.apply_bad_text_policy(
            where, "a NUL is not text", text.replace("\x00", REPLACEMENT)
        )
    if text is not None:
        yield Document(text.replace("\r\n", "\n").replace("\r", "\n"), file, None)


def _read_lines(reader: Reader, file: File, span: tuple[int, int] | None) -> Iterator[Document]:
    for number, line in read_lines(file, span):
        text = text_of_record(reader, line, f"{file}:{number}")
        if text is not None:
            yield Document(text, file, number)


def read_lines(file: File, span: tuple[int, int] | None) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines of a file or of one of its `ranges`, numbered from 1 there.

    Raises:
        TrainctlError: The file is binary.
    """
    _refuse_binary(file, read_head(file, HEAD_BYTES))
    start, end = span or (0, None)
    with open_decompressed(file) as stream:
        if start:
            stream.seek(start)
        at = start
        for number, raw in enumerate(stream, 1):
            if end is not None and at >= end:
                return
            line = (raw if at else raw.removeprefix(_BOM)).strip()
            at += len(raw)
            if line:
                yield number, line


def is_array(file: File) -> bool:
    """Return True if a file begins as a JSON array."""
    return read_head(file, HEAD_BYTES).removeprefix(_BOM).lstrip()[:1] == b"["


def read_array(file: File) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a JSON array, each with the line in which it begins, from 1.

    Bytes that are not UTF-8 become lone surrogates, which `Reader.clean` finds.

    Raises:
        TrainctlError: The array is malformed or cut off: nothing after that place can be read.
    """
    _refuse_binary(file, read_head(file, HEAD_BYTES))
    with open_decompressed(file) as stream:
        text = _ArrayText(stream)
        try:
            if text.take("[") and not text.take("]"):
                yield text.element()
                while text.take(","):
                    yield text.element()
                text.require("]")
            text.require("")
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise TrainctlError(
                f"{file}:{text.line}: the JSON array is malformed or cut off: {why}",
                hint="correct it, or write a record on each line of a .jsonl file",
            ) from None


class _ArrayText:
    """The text of a JSON array, of which little more than one element is in memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self.line = 1
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._text = self._decode(stream.read(_ARRAY_BYTES))
        self._at = 0

    def take(self, character: str) -> bool:
        """Skip white space, and the character if it is next; return whether it was."""
        while True:
            match = _WHITE_SPACE.match(self._text, self._at)
            assert match is not None
            self._advance(match.end())
            if self._at < len(self._text) or not self._fill():
                break
        is_next = bool(character) and self._text.startswith(character, self._at)
        self._at += is_next
        return is_next

    def require(self, character: str) -> None:
        """Take a character; the empty one is the end of the file."""
        if not self.take(character) and (character or self._at < len(self._text)):
            raise ValueError(f"no {character or 'end of the file'} follows the elements")

    def element(self) -> tuple[int, Any]:
        """Take an element, and return it with its line."""
        self.take("")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.pos > len(self._text) - _LONGEST_TOKEN or "Unterminated" in error.msg
                if not is_cut or not self._fill():
                    raise
                continue
            if end < len(self._text) or not self._fill():
                break  # a number at the end of the text may have more digits
        line = self.line
        self._advance(end)
        return line, value

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _fill(self) -> bool:
        """Read as much as is left, at least `_ARRAY_BYTES`; return False at the end of the file."""
        left = self._text[self._at :]
        raw = self._stream.read(max(_ARRAY_BYTES, len(left)))
        self._text, self._at = left + self._decode(raw, final=not raw), 0
        return bool(raw)


def record_of(reader: Reader, raw: bytes, where: str) -> Any:
    """Parse a line of JSON; `SKIPPED_RECORD` leaves it out."""
    line = reader.decoded(raw, where)
    if line is None:
        return SKIPPED_RECORD
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        reader.apply_bad_text_policy(where, f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        reader.apply_bad_text_policy(where, "not read: JSON nested too deeply")
    except ValueError as error:  # an integer of thousands of digits
        reader.apply_bad_text_policy(where, f"not read: {error}")
    return SKIPPED_RECORD


def text_of_record(reader: Reader, raw: bytes, where: str) -> str | None:
    """Return the text of a JSON object, such as a JSONL line; None leaves it out."""
    config = reader.config
    assert isinstance(config, DataFromRecords)
    before = reader.bad.replaced
    record = record_of(reader, raw, where)
    if record is SKIPPED_RECORD:
        return None
    text = record.get(config.text_key) if isinstance(record, dict) else None
    if isinstance(text, str):
        text = reader.clean(text, where)
        reader.bad.replaced = min(reader.bad.replaced, before + 1)  # a document counts once
        return text
    if config.on_bad_text is OnBadText.skip:
        return reader.apply_bad_text_policy(where, f"no text under {config.text_key!r}")
    if not isinstance(record, dict):
        return reader.apply_bad_text_policy(where, f"a JSON {_json_type(record)}, not an object")
    raise NoTextKey(where, config.text_key, record)


def _first_line_problem(file: File, head: bytes, config: DataConfig) -> TrainctlError | None:
    """Return the first problem of a JSONL file's first lines.

    If the policy skips bad lines, it is a problem only if no line is good.
    """
    lines = head.removeprefix(_BOM).split(b"\n")
    if len(head) == HEAD_BYTES:
        lines.pop()  # incomplete
    may_skip = config.on_bad_text is OnBadText.skip
    reader = Reader(replace(config, on_bad_text=OnBadText.error) if may_skip else config)
    problems, good = [], 0
    for number, line in enumerate(lines[:_LINES_READ], 1):
        if not line.strip():
            continue
        try:
            text_of_record(reader, line.strip(), f"{file}:{number}")
            good += 1
        except TrainctlError as error:
            problems.append(error)
    return problems[0] if problems and not (may_skip and good) else None


def _encoding_problem(file: File, head: bytes, config: DataConfig) -> TrainctlError | None:
    if config.on_bad_text is not OnBadText.error:
        return None
    try:
        # The head may end within a character.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        try:
            Reader(config).decoded(head, str(file), whole=True)
        except TrainctlError as error:
            return error
    return None


def _refuse_binary(file: File, head: bytes) -> None:
    found = binary_format(head)
    if found is not None:
        kind, hint = found
        raise TrainctlError(f"{file} is {kind}, not text", hint=hint.replace("FILE", str(file)))


def _keys_in_words(keys: list[str]) -> str:
    """Join the first keys, quoted, and the number of the others."""
    more = [f"{len(keys) - _KEYS_SHOWN} more"] if len(keys) > _KEYS_SHOWN else []
    return ", ".join([*(repr(key) for key in keys[:_KEYS_SHOWN]), *more])


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "literal", type(None): "literal"}
    return names.get(type(value), "number")
