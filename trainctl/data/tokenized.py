"""Corpora tokenized by other tools: their ids and document ends, used without a copy.

| made by | ids | ends |
|---|---|---|
| Megatron-LM | `NAME.bin` | `NAME.idx`: lengths of sequences, and which of them begin a document |
| datatrove, nanotron | `NAME.ds` | `NAME.ds.index`: 8 bytes a document |
| OLMo, dolma | `NAME.npy`, without a header | `NAME.csv.gz`: a row a document |
| trainctl | `NAME.bin` | `NAME.ends`: 8 bytes a document |
| numpy, llm.c, anyone | an array with or without its header | where the end id is |

The files of ids are memory-mapped. Checks that need not read everything are made: the type against
the vocabulary, the index against the sizes, and ids at places all over the file.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.cache_files import map_array
from trainctl.errors import TrainctlError

Ids = npt.NDArray[np.integer]
Ends = npt.NDArray[np.int64]

_MEGATRON = b"MMIDIDX\x00\x00"
# megatron/core/datasets/indexed_dataset.py, `DType`, without its floating-point types.
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_HEADER = 34
"""Bytes of the magic, version, type, number of sequences, and number of document entries."""
_NPY = b"\x93NUMPY"
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""dtype of the ids by the magic number of the header (llm.c, `dev/data/data_common.py`)."""
_LLM_C_HEADER = 1024
"""Bytes of the header: 256 integers."""
_PROBES = 64
"""Number of places in a file whose ids are checked."""
_PROBE = 1 << 14
"""Number of ids checked at each place."""
_CHUNK = 1 << 24
"""Ids searched for document ends at a time."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """An open file of token ids."""

    file: Path
    ids: Ids
    ends: Ends | None
    """End of each document (exclusive), ascending, shape (documents,); None if there is no
    index.
    """
    tokenizer: str = ""
    """Name of the tokenizer, if the file's metadata has it; else empty."""
    offset: int = 0
    """Bytes of the file before the first id."""

    def problems(
        self, vocab_size: int, end_of_document: int | None, *, whole: bool = False
    ) -> list[str]:
        """Describe why a model of this vocabulary cannot train on the file; empty if it can.

        `whole` checks every id instead of ids at places all over the file.
        """
        ids, found = self.ids, []
        if len(ids) == 0:
            return [f"{self.file} is empty"]
        wrong = next(
            (at for at in _extreme_places(ids, whole) if not 0 <= ids[at] < vocab_size), None
        )
        if wrong is not None:
            found.append(
                f"{self.file} has the id {ids[wrong]:,} at token {wrong:,}, and the vocabulary "
                f"has {vocab_size:,}{_other_type(self, vocab_size)}"
            )
        elif vocab_size > np.iinfo(ids.dtype).max + 1:
            found.append(
                f"{self.file} has ids of {ids.dtype.itemsize} bytes, which cannot be those of a "
                f"vocabulary of {vocab_size:,}: another tokenizer made them"
            )
        if self.ends is not None and end_of_document is not None and not found:
            places = _spread_places(len(self.ends), _PROBES * _PROBE)
            full = self.ends[places][np.diff(self.ends, prepend=0)[places] > 0]
            if len(full) and not (ids[full - 1] == end_of_document).any():
                found.append(
                    f"no document of {self.file} ends in {end_of_document}, the tokenizer's end "
                    f"of a document; the first ends in {int(ids[full[0] - 1])}"
                )
        return found


def open_section_file(section: Any, file: Path) -> Tokenized:
    """Open a file of a source of `options.data.tokens`. Raises as `open_tokenized`."""
    return open_tokenized(file, section.id_type.value if section.id_type else None)


def open_tokenized(file: Path, dtype: str | None = None) -> Tokenized:
    """Open a file of ids with its index, which is found by the file names of the tool that made it.

    Args:
        file: The `.bin` of Megatron, the `.ds` of datatrove, or any array.
        dtype: Type of the ids if neither index nor header has it: ``u2`` or ``u4``.

    Raises:
        TrainctlError: Index and ids do not fit, or the type of the ids is unknown.
    """
    with _convert_read_errors(file):
        index = file.with_suffix(".idx")
        if file.suffix == ".bin" and index.is_file():
            return _open_megatron(file, index)
        with file.open("rb") as stream:
            head = stream.read(_LLM_C_HEADER)
        if file.suffix == ".ds" or file.with_name(f"{file.name}.index").is_file():
            return _open_datatrove(file, dtype)
        own = file.with_suffix(".ends")
        if own.is_file():
            return _open_with_index(file, own, dtype)
        if head.startswith(_NPY):
            return _open_numpy(file)
        first = int.from_bytes(head[:4], "little")
        if first in _LLM_C and len(head) == _LLM_C_HEADER:
            return _open_llm_c(file, head, _LLM_C[first])
        ids = map_ids(file, _stated_dtype(file, dtype))
        return _require_consistent(Tokenized(file, ids, _dolma_ends(file)))


def ends_by_id(ids: Ids, end_of_document: int) -> Ends:
    """Return the document ends, found by the end-of-document id.

    Tokens after the last such id are a document. All ids are read, in order.
    """
    found = [
        np.flatnonzero(ids[start : start + _CHUNK] == end_of_document) + start + 1
        for start in range(0, len(ids), _CHUNK)
    ]
    ends = np.concatenate(found) if found else np.empty(0, np.int64)
    if len(ids) and (len(ends) == 0 or ends[-1] != len(ids)):
        ends = np.append(ends, len(ids))
    return ends.astype(np.int64, copy=False)


def _open_megatron(file: Path, index: Path) -> Tokenized:
    raw = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.empty(0, np.uint8)
    head = raw[:_MEGATRON_HEADER].tobytes()
    if len(head) < _MEGATRON_HEADER or not head.startswith(_MEGATRON):
        raise _unusable_error(index, "it is no index of Megatron's")
    if int.from_bytes(head[9:17], "little") != 1:
        raise _unusable_error(
            index, f"its version is {int.from_bytes(head[9:17], 'little')}, not 1"
        )
    if head[17] not in _MEGATRON_TYPES:
        raise _unusable_error(index, f"its type is number {head[17]}, which is none of ids")
    sequences, entries = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
    # Lengths, byte offsets, then the first sequence of each document and the number of all.
    starts = [_MEGATRON_HEADER, _MEGATRON_HEADER + 4 * sequences, _MEGATRON_HEADER + 12 * sequences]
    if len(raw) < starts[2] + 8 * entries:
        raise _unusable_error(
            index, f"it is cut off: {len(raw):,} of {starts[2] + 8 * entries:,} bytes"
        )
    lengths = raw[starts[0] : starts[1]].view("<i4")
    places = raw[starts[1] : starts[2]].view("<i8")
    firsts = raw[starts[2] : starts[2] + 8 * entries].view("<i8")
    ids = map_ids(file, _MEGATRON_TYPES[head[17]])
    stops = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or not np.array_equal(places, stops[:-1] * ids.itemsize):
        raise _unusable_error(index, "its sequences do not follow one another in the file of ids")
    is_whole = entries > 0 and firsts[0] == 0 and firsts[-1] == sequences
    if not is_whole or (np.diff(firsts) < 0).any():
        raise _unusable_error(index, "its documents do not have each sequence once")
    return _require_consistent(Tokenized(file, ids, stops[firsts[1:]]))


def _open_datatrove(file: Path, dtype: str | None) -> Tokenized:
    index, metadata = (file.with_name(f"{file.name}.{end}") for end in ("index", "metadata"))
    tokenizer, width = "", ""
    if metadata.is_file():  # "NAME|BYTES"; older files: "NAME", two bytes
        first = metadata.read_text("utf-8", errors="replace").partition("\n")[0]
        tokenizer, _, width = first.rpartition("|") if "|" in first else (first, "", "2")
    known = dtype or (f"u{width}" if width in ("2", "4") else None)
    if index.is_file():
        return _open_with_index(file, index, known, tokenizer)
    return Tokenized(file, map_ids(file, _stated_dtype(file, known)), None, tokenizer)


def _open_with_index(file: Path, index: Path, dtype: str | None, tokenizer: str = "") -> Tokenized:
    """Open a file with an index of 8 bytes a document, which also tells the width of the ids."""
    if index.stat().st_size % 8:
        raise _unusable_error(index, f"{index.stat().st_size:,} bytes are no numbers of 8")
    ends = np.fromfile(index, "<u8").astype(np.int64)
    if dtype is None and len(ends):
        width = file.stat().st_size // max(1, int(ends[-1]))
        dtype = f"u{width}" if width in (2, 4) else None
    return _require_consistent(
        Tokenized(file, map_ids(file, _stated_dtype(file, dtype)), ends, tokenizer)
    )


def _dolma_ends(file: Path) -> Ends | None:
    """Read `NAME.csv.gz`, whose rows begin with the start and end of a document in ids."""
    index = file.with_suffix(".csv.gz")
    if not index.is_file():
        return None
    try:
        with gzip.open(index, "rb") as stream:
            rows = csv.reader(io.TextIOWrapper(stream, "utf-8", errors="replace", newline=""))
            first = next(rows, [])
            named = [] if first[:1] == ["start"] else [first]
            found = [(int(row[0]), int(row[1])) for row in chain(named, rows) if row]
        places = np.array(found, np.int64)
    except (
        ValueError,
        OverflowError,
        IndexError,
        EOFError,
        csv.Error,
        zlib.error,
        gzip.BadGzipFile,
    ) as error:
        why = f"its rows do not begin with two places, or it is cut off ({error})"
        raise _unusable_error(index, why) from None
    if len(places) == 0:
        return np.empty(0, np.int64)
    if places[0, 0] != 0 or (places[1:, 0] != places[:-1, 1]).any():
        raise _unusable_error(index, "its documents do not follow one another")
    return places[:, 1].copy()


def _open_numpy(file: Path) -> Tokenized:
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OverflowError, SyntaxError, TokenError) as error:
        raise _unusable_error(file, f"numpy cannot read it: {error}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise _unusable_error(
            file, f"it is an array of {ids.dtype} of shape {ids.shape}, not a list of ids"
        )
    assert isinstance(ids, np.memmap)
    return Tokenized(file, map_ids(file, ids.dtype.str, ids.offset), None, offset=ids.offset)


def _open_llm_c(file: Path, head: bytes, dtype: str) -> Tokenized:
    count = int.from_bytes(head[8:12], "little")
    ids = map_ids(file, dtype, _LLM_C_HEADER)
    if len(ids) != count:
        raise _unusable_error(file, f"its header says {count:,} ids, and it has {len(ids):,}")
    return Tokenized(file, ids, None, offset=_LLM_C_HEADER)


def _stated_dtype(file: Path, dtype: str | None) -> str:
    if dtype is None:
        raise TrainctlError(
            f"nothing tells of which type the ids in {file} are",
            hint="data.id_type=uint16, or uint32",
        )
    return np.dtype(dtype).newbyteorder("<").str


def map_ids(file: Path, dtype: str, offset: int = 0) -> Ids:
    """Memory-map the ids of a file. The kernel is advised of random access.

    Raises:
        OSError: The file cannot be read.
        TrainctlError: The size is no multiple of the dtype's.
    """
    size, width = file.stat().st_size - offset, np.dtype(dtype).itemsize
    if size % width:
        raise _unusable_error(file, f"{size:,} bytes are no ids of {width} bytes")
    return map_array(file, dtype, offset)


def _require_consistent(tokenized: Tokenized) -> Tokenized:
    ends, count = tokenized.ends, len(tokenized.ids)
    if ends is None:
        return tokenized
    last = int(ends[-1]) if len(ends) else 0
    if last != count:
        raise _unusable_error(
            tokenized.file, f"its index ends at id {last:,}, and it has {count:,}"
        )
    if len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any()):
        raise _unusable_error(tokenized.file, "the ends of its documents do not ascend")
    return tokenized


def _extreme_places(ids: Ids, whole: bool) -> Iterator[int]:
    """Yield the positions of the lowest and the highest id of each part that is checked."""
    if whole or len(ids) <= _PROBES * _PROBE:
        starts: Sequence[int] = range(0, len(ids), _CHUNK)
        size = _CHUNK
    else:
        starts, size = _spread_places(len(ids) - _PROBE + 1, _PROBES).tolist(), _PROBE
    for start in starts:
        part = ids[start : start + size]
        yield start + int(part.argmin())
        yield start + int(part.argmax())


def _other_type(tokenized: Tokenized, vocab_size: int) -> str:
    """Return a hint if the bytes would be valid ids of the other width; else an empty text."""
    ids = tokenized.ids
    other = np.dtype("<u4" if ids.itemsize == 2 else "<u2")
    if tokenized.ends is not None or ids.nbytes % other.itemsize:
        return ""
    seen = ids.view(other)
    fits = all(seen[at] < vocab_size for at in _extreme_places(seen, whole=False))
    return f"; they would fit as {other.name}" if fits else ""


def _spread_places(count: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most `most` positions, evenly spaced from the first to the last of `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _unusable_error(file: Path, why: str) -> TrainctlError:
    return TrainctlError(f"{file} cannot be used: {why}", hint="copy or make it again")


@contextmanager
def _convert_read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainctlError(f"cannot read {error.filename or file}: {error.strerror}") from None
