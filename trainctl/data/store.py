"""Store of a text source tokenized by one tokenizer, in parts that are each made once. No torch.

    store-KEY/parts/CONTENT/    the tokens of a few files, or of a range of one (see below)
    store-KEY/tasks/TASK.json   the files as they were, and the part made of them: the task is done
    store-KEY/claims/TASK       the process that works on the task

The store's key covers what turns bytes into tokens: the tokenizer, how the source is read, and what
is done with bad text. A part's key is a hash of the bytes, so a copied corpus is read but not
tokenized again. A task's key covers the files' paths, sizes and times, so checking that everything
is done reads no text. A part is renamed to its final name once it is complete on disk, and then its
task's record is written. If a process is killed in between, the next one continues, and its part is
the same byte for byte.

Other programs can read a part: each file is one flat array.

| file | one entry per | |
|---|---|---|
| `ids.bin` | token | u16 or u32, little endian, with each document's end if there is one |
| `ends.bin` | document | u64: tokens of the part up to its end |
| `origin.bin` | document | u32: number of its piece in the task; u32: its line there from 1, or 0 |
| `hash.bin` | document | 16 bytes: the first of the SHA-256 of its text |
| `targets.bin` | document | f32: its targets, NaN up to the width; no file if no document has any |
| `part.json` | | sizes and CRC-32 of these files, and bad text; written last |

A part stores piece numbers instead of paths, so that it also serves a copy of the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import DataConfig
from trainctl.data.cache_files import convert_write_errors, map_array, write_synced
from trainctl.data.targets import NO_TARGETS, RECORDS, TARGET, KeptRecords, TargetLayout, targets_of
from trainctl.data.tasks import Claims, FileRange, Task, plan_tasks
from trainctl.data.tokenizer import Encoder, dtype_for, encode_documents
from trainctl.errors import TrainctlError
from trainctl.options.data import document_identity, spec_of
from trainctl.readers.documents import Reader
from trainctl.readers.files import digest_of, file_sort_key
from trainctl.readers.remote import File, RemoteFile
from trainctl.runs.files import sync_directory, write_json

MANIFEST = "part.json"
ORIGIN = np.dtype([("piece", "<u4"), ("line", "<u4")])
HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a document: a piece of the task, and a line in it."""

    piece: int
    line: int
    """Line in the piece, from 1; 0 if the file is the document."""


@dataclass(frozen=True, slots=True)
class RangeCounts:
    """Facts about a piece that are not stored per document."""

    lines: int = 0
    """Number of line feeds: the offset of line numbers in the next piece of the same file."""
    replaced: int = 0
    skipped: int = 0
    examples: tuple[str, ...] = ()
    """Places of bad text, to be appended to the file's path."""


@dataclass(frozen=True, slots=True)
class StorePart:
    """Manifest of a part, as stored in `part.json`."""

    folder: Path
    dtype: str
    tokens: int
    documents: int
    text_bytes: int
    files: dict[str, tuple[int, int]]
    """Size in bytes and CRC-32 of each file, by name."""
    pieces: tuple[RangeCounts, ...]
    """Facts of each piece of the task, in order."""
    targets: TargetLayout = NO_TARGETS

    @classmethod
    def load(cls, folder: Path) -> StorePart:
        """Read the manifest of a folder."""
        try:
            data = json.loads((folder / MANIFEST).read_bytes())
            data["files"] = {name: tuple(pair) for name, pair in data["files"].items()}
            facts = ({**each, "examples": tuple(each["examples"])} for each in data["pieces"])
            data["pieces"] = tuple(RangeCounts(**each) for each in facts)
            data["targets"] = TargetLayout.from_plain(data.get("targets", {}))
            return cls(folder=folder, **data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedPart(folder, f"{MANIFEST}: {error}") from None

    def ids(self) -> npt.NDArray[np.integer]:
        """Return the token ids, (tokens,), memory-mapped and verified by checksum."""
        return self._read("ids.bin", self.dtype)

    def ends(self) -> npt.NDArray[np.uint64]:
        """Return the end of each document in tokens, (documents,), memory-mapped and verified."""
        return self._read("ends.bin", "<u8")

    def origin(self) -> npt.NDArray[Any]:
        """Return the `ORIGIN` of each document, (documents,), memory-mapped and verified."""
        return self._read("origin.bin", ORIGIN)

    def hashes(self) -> npt.NDArray[np.uint8]:
        """Return each document's hash, (documents, `HASH_BYTES`), memory-mapped and verified."""
        return self._read("hash.bin", "u1").reshape(-1, HASH_BYTES)

    def target_rows(self) -> npt.NDArray[np.float32]:
        """Return each document's targets, (documents, width), memory-mapped and verified."""
        if not self.targets.width:
            return np.empty((self.documents, 0), TARGET)
        return self._read("targets.bin", TARGET).reshape(-1, self.targets.width)

    def records(self) -> list[bytes]:
        """Return the line of each document that `KeptRecords` made; empty if none are kept."""
        if RECORDS not in self.files:
            return []
        return bytes(self._read(RECORDS, "u1")).splitlines(keepends=True)

    def _read(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        """Map a file of the part as an array.

        Raises:
            DamagedPart: The file is missing, or its size or checksum is wrong.
        """
        size, checksum = self.files.get(name, (0, 0))
        try:
            raw: Any = map_array(self.folder / name, "u1", in_order=True)
        except OSError as error:
            raise DamagedPart(self.folder, f"{name}: {error.strerror}") from None
        if (len(raw), zlib.crc32(raw)) != (size, checksum):
            raise DamagedPart(self.folder, f"{name} has another size or checksum")
        array: npt.NDArray[Any] = raw.view(dtype)
        return array


class DamagedPart(Exception):
    """Error of any reading: the part in `folder` is not what was written. Callers rewrite it."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{folder}: {why}")
        self.folder, self.why = folder, why


def write_part(
    folder: Path,
    tokenizer: Encoder,
    documents: Iterable[tuple[Origin, str]],
    pieces: Callable[[], Iterable[RangeCounts]],
    progress: Callable[[int], None],
) -> None:
    """Tokenize documents into a new folder. All files are synced, the manifest last.

    Args:
        folder: Created here; the caller renames it to its final name.
        pieces: Returns the facts of the pieces; called after the last document.
        progress: Called after each document with its number of characters.
    """
    dtype = dtype_for(tokenizer.vocab_size)
    ends: list[int] = []
    origins: list[tuple[int, int]] = []
    hashes, records = bytearray(), bytearray()
    targets = []
    tokens = text_bytes = checksum = 0
    folder.mkdir()
    with (folder / "ids.bin").open("wb") as stream:
        for origin, text, ids in encode_documents(documents, tokenizer):
            raw = ids.astype(dtype).tobytes()
            stream.write(raw)
            checksum = zlib.crc32(raw, checksum)
            tokens += len(ids)
            ends.append(tokens)
            origins.append((origin.piece, origin.line))
            utf_8 = text.encode()
            hashes += hashlib.sha256(utf_8).digest()[:HASH_BYTES]
            text_bytes += len(utf_8)
            targets.append(targets_of(tokenizer, text))
            if isinstance(tokenizer, KeptRecords):
                records += tokenizer.record(text, ids)
            progress(len(text))
        stream.flush()
        os.fsync(stream.fileno())
    files = {"ids.bin": (tokens * np.dtype(dtype).itemsize, checksum)}
    arrays = {
        "ends.bin": np.array(ends, dtype="<u8").tobytes(),
        "origin.bin": np.array(origins, dtype=ORIGIN).tobytes(),
        "hash.bin": bytes(hashes),
    }
    layout = TargetLayout.of(targets)
    if layout.width:
        arrays["targets.bin"] = layout.to_array(targets).tobytes()
    if isinstance(tokenizer, KeptRecords):
        arrays[RECORDS] = bytes(records)
    files |= {name: write_synced(folder / name, raw) for name, raw in arrays.items()}
    manifest = {
        "dtype": dtype,
        "tokens": tokens,
        "documents": len(ends),
        "text_bytes": text_bytes,
        "files": files,
        "pieces": [asdict(piece) for piece in pieces()],
        **({"targets": asdict(layout)} if layout.width else {}),
    }
    write_json(folder / MANIFEST, manifest)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a part to its final name. If another process was faster, keep its identical part."""
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / MANIFEST).is_file():
            raise
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(folder.parent)


FORMAT = 1
_BLOCK = 1 << 20


@dataclass
class TokenStore:
    """A store as one process works on it."""

    folder: Path
    config: DataConfig
    """Section of the source: how it is read, and what is done with bad text."""
    tokenizer: Encoder
    claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self.claims = Claims(self.folder / "claims")

    @classmethod
    def of(cls, cache: Path, config: DataConfig, tokenizer: Encoder) -> TokenStore:
        """Return the store of a source and a tokenizer under `cache`; it is created if missing."""
        settings = {
            "format": FORMAT,
            "tokenizer": tokenizer.fingerprint,
            "source": document_identity(config),
            "on_bad_text": config.on_bad_text.value,
        }
        key = digest_of(json.dumps(settings, sort_keys=True))[:24]
        store = cls(cache / f"store-{key}", config, tokenizer)
        with convert_write_errors(store.folder):
            for name in ("parts", "tasks", "claims"):
                (store.folder / name).mkdir(parents=True, exist_ok=True)
            if not (store.folder / "store.json").is_file():
                write_json(store.folder / "store.json", settings)
        return store

    def tasks(self, files: Sequence[File]) -> list[Task]:
        """Return the tasks for all documents of files, in order."""
        try:
            return list(plan_tasks(files, spec_of(self.config).ranges))
        except OSError as error:
            raise TrainctlError(f"cannot read {error.filename}: {error.strerror}") from None

    def is_done(self, task: Task) -> bool:
        """Return True if the task's part exists."""
        content = self._content_of(task)
        return content is not None and (self._part_folder(content) / "part.json").is_file()

    def part(self, task: Task) -> StorePart:
        """Return the part of a finished task.

        Raises:
            DamagedPart: The part or its manifest is missing, or the part is of other files.
        """
        content = self._content_of(task)
        if content is None:
            raise DamagedPart(self._record(task), "it is not there")
        part = StorePart.load(self._part_folder(content))
        if len(part.pieces) != len(task.pieces):
            raise DamagedPart(part.folder, "it is of other files")
        return part

    def documents_in(self, task: Task) -> int:
        """Return the number of documents of a finished task; 0 if its part is damaged."""
        try:
            return self.part(task).documents
        except DamagedPart:
            return 0

    def do(self, task: Task, progress: Callable[[int], None] = lambda _: None) -> None:
        """Make the part of a task, unless the same content has been tokenized before.

        Several processes may do one task: the first part counts, and the others are dropped.

        Raises:
            TrainctlError: A file cannot be read, has bad text or has changed; or the store cannot
                be written (exit code 4).
        """
        counts_lines = spec_of(self.config).counts_lines
        content, lines = _content_digest(task, counts_lines)
        part = self._part_folder(content)
        if not (part / "part.json").is_file():
            self.discard(part)
            temporary = part.with_name(f".{task.key}.{secrets.token_hex(4)}")
            try:
                with convert_write_errors(self.folder):
                    readers = [Reader(self.config) for _ in task.pieces]
                    write_part(
                        temporary,
                        self.tokenizer,
                        _task_documents(task, readers, counts_lines),
                        lambda: map(_range_counts, task.pieces, readers, lines),
                        progress,
                    )
                    _require_unchanged(task)
                    put_in_place(temporary, part)
            except TrainctlError:
                if not self.is_done(task):
                    raise
                return  # the process that took over removed this
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        _require_unchanged(task)
        with convert_write_errors(self.folder):
            write_json(self._record(task), {**task.to_plain(), "part": content})

    def discard(self, part: Path) -> None:
        """Remove a damaged part of this store or of another source's."""
        with convert_write_errors(self.folder):
            if part.parent.name == "parts" and part.exists():
                away = part.with_name(f".{part.name}.damaged")
                shutil.rmtree(away, ignore_errors=True)
                part.rename(away)
                shutil.rmtree(away, ignore_errors=True)

    def finish(self, tasks: Sequence[Task]) -> None:
        """Remove what killed processes left of finished tasks."""
        claimed = {path.name.partition(".")[0] for path in (self.folder / "claims").iterdir()}
        for name in ("parts", "tasks"):
            claimed |= {path.name.split(".")[1] for path in (self.folder / name).glob(".*")}
        for task in tasks:
            if task.key in claimed:
                self.claims.forget(task.key)
                self.remove_leftovers(task)

    def remove_leftovers(self, task: Task) -> None:
        """Remove what killed processes left of a task, which is finished or claimed."""
        for folder in (self.folder / "parts").glob(f".{task.key}.*"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.folder / "tasks").glob(f".{task.key}.json.*"):
            file.unlink(missing_ok=True)

    def _content_of(self, task: Task) -> str | None:
        try:
            return str(json.loads(self._record(task).read_bytes())["part"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _record(self, task: Task) -> Path:
        return self.folder / "tasks" / f"{task.key}.json"

    def _part_folder(self, content: str) -> Path:
        return self.folder / "parts" / content


def files_in_order(train: Sequence[File], held_out: Sequence[File]) -> list[File]:
    """Return all files of a corpus in one order that keeps the order within each split."""
    return sorted({*train, *held_out}, key=file_sort_key) if held_out else list(train)


def lines_before(piece: FileRange) -> int:
    """Count the lines of a file before a range; everything before it is read."""
    return sum(block.count(b"\n") for block in _file_blocks(piece.file, 0, piece.start))


def shift_line_number(text: str, piece: FileRange, before: int) -> str:
    """Replace a range's line number at the start of a text by the line number in the file.

    Args:
        text: Begins with `FILE:LINE` or `:LINE`, counted within the range; else it is unchanged.
        before: Lines of the file before the range.
    """
    match = re.match(rf"((?:{re.escape(str(piece.file))})?:)(\d+)(?!\d)", text)
    return f"{match[1]}{int(match[2]) + before}{text[match.end() :]}" if match else text


def read_documents(task: Task, config: DataConfig) -> Iterator[tuple[Origin, str]]:
    """Yield the documents of a task from its files again, as they are in its part."""
    readers = [Reader(config) for _ in task.pieces]
    yield from _task_documents(task, readers, spec_of(config).counts_lines)
    _require_unchanged(task)


def _task_documents(
    task: Task, readers: Sequence[Reader], counts_lines: bool
) -> Iterator[tuple[Origin, str]]:
    for number, (piece, reader) in enumerate(zip(task.pieces, readers, strict=True)):
        try:
            for document in reader.read(piece.file, piece.span):
                yield Origin(number, document.line or 0), document.text
        except TrainctlError as error:
            if piece.start and counts_lines:
                error.message = shift_line_number(error.message, piece, lines_before(piece))
                error.args = (error.message,)
            raise


def _range_counts(piece: FileRange, reader: Reader, lines: int) -> RangeCounts:
    examples = tuple(text.removeprefix(str(piece.file)) for text in reader.bad.examples)
    return RangeCounts(lines, reader.bad.replaced, reader.bad.skipped, examples)


def _content_digest(task: Task, counts_lines: bool) -> tuple[str, list[int]]:
    """Return a digest of the bytes that a task reads, and the line feeds of each piece.

    File names are part of the digest, because a source may depend on a file's suffix; folders are
    not. Of a range's start only whether it is 0 counts, because a byte order mark may come first.

    Remote files are not fetched for the digest: URL and version stand for their bytes, and they are
    read only to count the lines of a range. Path, size and time stand for ranges that are not byte
    ranges, because reading one of them reads the whole file.
    """
    digest = hashlib.blake2b(digest_size=16)
    lines = []
    for piece in task.pieces:
        lines.append(0)
        blocks = _file_blocks(
            piece.file, piece.start, piece.size if piece.end is None else piece.end
        )
        if isinstance(piece.file, RemoteFile) or (piece.end is not None and not counts_lines):
            digest.update(json.dumps(piece.to_plain()).encode())
            if piece.end is not None and counts_lines:
                lines[-1] = sum(block.count(b"\n") for block in blocks)
            continue
        own = hashlib.blake2b(digest_size=32)
        try:
            for block in blocks:
                own.update(block)
                lines[-1] += block.count(b"\n") if counts_lines else 0
        except OSError as error:
            raise TrainctlError(f"cannot read {piece.file}: {error.strerror}") from None
        start = min(piece.start, 1) if counts_lines else piece.start
        name = json.dumps([piece.file.name, start, piece.end is not None])
        digest.update(name.encode() + own.digest())
    return digest.hexdigest(), lines


def _file_blocks(file: File, start: int, end: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        stream.seek(start)
        while start < end and (block := stream.read(min(_BLOCK, end - start))):
            yield block
            start += len(block)


def _require_unchanged(task: Task) -> None:
    for piece in task.pieces:
        try:
            if piece.is_as_planned:
                continue
        except OSError:
            pass
        raise TrainctlError(
            f"{piece.file} has changed while it was read",
            hint="start again when nobody writes there",
        )
