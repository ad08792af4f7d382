"""A part of a store: the tokens of some documents, with the end, origin and hash of each document.

Other programs can read a part: each file is one flat array.

| file | one entry per | |
|---|---|---|
| `ids.bin` | token | u16 or u32, little endian, with each document's end if there is one |
| `ends.bin` | document | u64: tokens of the part up to its end |
| `origin.bin` | document | u32: number of its piece in the task; u32: its line there from 1, or 0 |
| `hash.bin` | document | 16 bytes: the first of the SHA-256 of its text |
| `part.json` | | sizes and CRC-32 of these files, and bad text; written last |

A part stores piece numbers instead of paths, so that it also serves a copy of the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.cache_files import map_array, write_synced
from trainctl.data.tokenizer import Encoder, dtype_for, encode_documents
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

    @classmethod
    def load(cls, folder: Path) -> StorePart:
        """Read the manifest of a folder."""
        try:
            data = json.loads((folder / MANIFEST).read_bytes())
            data["files"] = {name: tuple(pair) for name, pair in data["files"].items()}
            facts = ({**each, "examples": tuple(each["examples"])} for each in data["pieces"])
            data["pieces"] = tuple(RangeCounts(**each) for each in facts)
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
    hashes = bytearray()
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
            progress(len(text))
        stream.flush()
        os.fsync(stream.fileno())
    files = {"ids.bin": (tokens * np.dtype(dtype).itemsize, checksum)}
    arrays = {
        "ends.bin": np.array(ends, dtype="<u8").tobytes(),
        "origin.bin": np.array(origins, dtype=ORIGIN).tobytes(),
        "hash.bin": bytes(hashes),
    }
    files |= {name: write_synced(folder / name, raw) for name, raw in arrays.items()}
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
    """Rename a part to its final name. If another process was faster, keep its identical part."""
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / MANIFEST).is_file():
            raise
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(folder.parent)
