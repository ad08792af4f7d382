"""A part of a store: the tokens of some documents, and of each document where it ends, where it
came from and what it is. Other programs can read it: each file is one flat array.

| file | of each | |
|---|---|---|
| `ids.bin` | token | u16 or u32, little endian, with each document's end if there is one |
| `ends.bin` | document | u64: tokens of the part up to its end |
| `origin.bin` | document | u32: which piece of the task; u32: its line there from 1, or 0 |
| `hash.bin` | document | 16 bytes: the first of the SHA-256 of its text |
| `part.json` | | sizes and CRC-32 of these, what was bad in the text; written last |

A part knows no paths, only its pieces' numbers: it serves a copy of the same files, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.encoding import Encoder, dtype_for, encoded
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.atomic import sync_directory, write_json

MANIFEST = "part.json"
ORIGIN = np.dtype([("piece", "<u4"), ("line", "<u4")])
HASH_BYTES = 16
_NOTHING = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a document of a part came from."""

    piece: int
    """Number of the piece in its task."""
    line: int
    """Its line in that piece, from 1; 0 where the file is the document."""


@dataclass(frozen=True, slots=True)
class PieceFacts:
    """What is kept of a piece beside its documents."""

    lines: int = 0
    """Line feeds in it: how far the lines of the next piece of the same file are."""
    replaced: int = 0
    """Its documents in which something is replaced."""
    skipped: int = 0
    examples: tuple[str, ...] = ()
    """Places of such, each after the file's path."""


@dataclass(frozen=True, slots=True)
class Part:
    """What `part.json` says."""

    folder: Path
    """Where its files are."""
    dtype: str
    """numpy name of the ids' type."""
    tokens: int
    """Their number."""
    documents: int
    text_bytes: int
    """Length of its documents in UTF-8."""
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 of each file."""
    pieces: tuple[PieceFacts, ...]
    """One for each of its task."""

    @classmethod
    def load(cls, folder: Path) -> Part:
        """Read the manifest of a folder.

        Raises:
            DamagedPart: There is none, or it is none.
        """
        try:
            data = json.loads((folder / MANIFEST).read_bytes())
            data["files"] = {name: tuple(pair) for name, pair in data["files"].items()}
            facts = ({**each, "examples": tuple(each["examples"])} for each in data["pieces"])
            data["pieces"] = tuple(PieceFacts(**each) for each in facts)
            return cls(folder=folder, **data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedPart(folder, f"{MANIFEST}: {error}") from None

    def ids(self) -> npt.NDArray[np.integer]:
        """Token ids, (tokens,), memory-mapped and compared with their checksum."""
        return self._read("ids.bin", self.dtype)

    def ends(self) -> npt.NDArray[np.uint64]:
        """Tokens up to the end of each document, (documents,); likewise."""
        return self._read("ends.bin", "<u8")

    def origin(self) -> npt.NDArray[Any]:
        """Of each document, an `ORIGIN`; likewise."""
        return self._read("origin.bin", ORIGIN)

    def hashes(self) -> npt.NDArray[np.uint8]:
        """Of each document, (documents, `HASH_BYTES`); likewise."""
        return self._read("hash.bin", "u1").reshape(-1, HASH_BYTES)

    def _read(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        """Return an array of the part.

        Raises:
            DamagedPart: It is not what was written.
        """
        size, checksum = self.files.get(name, (0, 0))
        try:
            found = (self.folder / name).stat().st_size
            raw: Any = np.asarray(np.memmap(self.folder / name, mode="r")) if found else _NOTHING
        except OSError as error:
            raise DamagedPart(self.folder, f"{name}: {error.strerror}") from None
        if (len(raw), zlib.crc32(raw)) != (size, checksum):
            raise DamagedPart(self.folder, f"{name} has another size or checksum")
        array: npt.NDArray[Any] = raw.view(dtype)
        return array


class DamagedPart(Exception):
    """A part is not what was written; it is made again.

    Attributes:
        folder: The part's.
        why: What is wrong, in words.
    """

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{folder}: {why}")
        self.folder, self.why = folder, why


def write_part(
    folder: Path,
    tokenizer: Encoder,
    documents: Iterable[tuple[Origin, str]],
    pieces: Callable[[], Iterable[PieceFacts]],
    progress: Callable[[int], None],
) -> None:
    """Tokenize documents into a new folder: all files synced, the manifest last.

    Args:
        folder: To make; it gets its final name by who calls.
        documents: Each with where it came from.
        pieces: What is kept of them, asked when the documents have ended.
        progress: Called after each document with the length of its text.

    Raises:
        OSError: The folder cannot be written.
    """
    dtype = dtype_for(tokenizer.vocab_size)
    ends: list[int] = []
    origins: list[tuple[int, int]] = []
    hashes = bytearray()
    tokens = text_bytes = checksum = 0
    folder.mkdir()
    with (folder / "ids.bin").open("wb") as stream:
        for origin, text, ids in encoded(documents, tokenizer):
            raw = ids.astype(dtype).tobytes()
            stream.write(raw)
            checksum = zlib.crc32(raw, checksum)
            tokens += len(ids)
            ends.append(tokens)
            origins.append((origin.piece, origin.line))
            utf_8 = text.encode()
            hashes += hashlib.sha256(utf_8).digest()[:HASH_BYTES]
            text_bytes += len(utf_8)
            progress(len(text))
        _sync(stream)
    files = {"ids.bin": (tokens * np.dtype(dtype).itemsize, checksum)}
    arrays = {
        "ends.bin": np.array(ends, dtype="<u8").tobytes(),
        "origin.bin": np.array(origins, dtype=ORIGIN).tobytes(),
        "hash.bin": bytes(hashes),
    }
    for name, raw in arrays.items():
        with (folder / name).open("wb") as stream:
            stream.write(raw)
            _sync(stream)
        files[name] = (len(raw), zlib.crc32(raw))
    manifest = {
        "dtype": dtype,
        "tokens": tokens,
        "documents": len(ends),
        "text_bytes": text_bytes,
        "files": files,
        "pieces": [asdict(piece) for piece in pieces()],
    }
    write_json(folder / MANIFEST, manifest)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a part its name; where another process was faster, the two are the same."""
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / MANIFEST).is_file():
            raise
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(folder.parent)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What goes wrong within it is the disk's, or that of its permissions."""
    try:
        yield
    except OSError as error:
        raise TrainctlError(
            f"cannot write the tokenized corpus, {folder}: {error.strerror or error}",
            hint="free space there, or name another folder in TRAINCTL_CACHE_DIR",
            exit_code=ExitCode.environment,
        ) from None


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
