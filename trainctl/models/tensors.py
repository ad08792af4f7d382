"""Tensors of a model: names, types and shapes in safetensors files, and a compact table of them.

Safetensors files are read from their headers alone: eight bytes give the length of a JSON header,
little-endian. It gives each tensor's type, shape and byte range in the rest of the file
(huggingface.co/docs/safetensors).

An entry of a table is a name and a description, such as
`model.layers.{0-47}.mlp.gate.weight 128x2048 router`. A range stands for each of its numbers, so
that a model of a thousand tensors takes a dozen lines. The table is part of the configuration, and
so of every run (`trainctl.models.anatomy`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from trainctl.errors import TrainctlError
from trainctl.untrusted import safe_name

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Pickled weights, which are not read: unpickling may run code."""

MOST_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""

WIDTHS = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element. Other types have no whole number of bytes per element."""

READABLE = ("F64", "F32", "F16", "BF16")
"""Types whose elements are the weights themselves; others need scales stored elsewhere."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    file: str
    """Name of the file within its directory."""
    dtype: str
    """Type by its safetensors name, such as `BF16`."""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * WIDTHS.get(self.dtype, 1)


SCORE = "score"
"""Name of the head that `AutoModelForSequenceClassification` gives a decoder."""

FUTURE = "mtp"
"""Name of the list of blocks behind the last one that predict further tokens (multi_token)."""


def may_be_new(name: str) -> bool:
    """Whether a tensor is of a head or a block that an objective adds to a published model."""
    return name == f"{SCORE}.weight" or name.startswith(f"{FUTURE}.")


SHOWN = 3
"""Maximum tensors that a message names."""


def join_first(items: list[str]) -> str:
    """Join the first items, and the number of remaining ones."""
    shown = "; ".join(items[:SHOWN])
    return shown if len(items) <= SHOWN else f"{shown}; and {len(items) - SHOWN:,} more"


def has_weights(folder: Path) -> bool:
    """Whether a directory has weights as transformers writes them."""
    return (folder / ONE_FILE).is_file() or (folder / INDEX).is_file()


def has_pickled_weights(folder: Path) -> bool:
    """Whether a directory has pickled weights, which are not read."""
    return any((folder / name).is_file() for name in OTHER_FORMS)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor in a directory's safetensors, single or sharded, by its stored name.

    Raises:
        TrainctlError: There are none, or one of the files is missing, truncated or malformed; names
            the file.
    """
    if (folder / INDEX).is_file():
        files = weight_map(folder)
    elif (folder / ONE_FILE).is_file():
        return _read_header(folder / ONE_FILE)
    else:
        raise _unreadable_error(folder, f"has neither {ONE_FILE} nor {INDEX}")
    headers = {file: _read_header(folder / file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in headers[file]:
            raise _unreadable_error(folder / INDEX, f"says that {name} is in {file}, and it is not")
    return {name: headers[file][name] for name, file in files.items()}


def weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor in a sharded directory.

    Raises:
        TrainctlError: The index is unreadable, or names a file outside the directory.
    """
    path = folder / INDEX
    try:
        if path.stat().st_size > MOST_HEADER_BYTES:
            raise _unreadable_error(path, f"has more than {MOST_HEADER_BYTES:,} bytes")
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise _unreadable_error(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable_error(path, f"is no index of weights ({error!r:.80})") from None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise _unreadable_error(
            path, "is no index of weights: weight_map gives no file for each name"
        )
    for file in set(files.values()):
        try:
            safe_name(file)
        except ValueError as error:
            raise _unreadable_error(path, f"is no index of weights: {error}") from None
    return files


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe, which has no bytes yet, is opened at once."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        size = path.stat().st_size
        with open(path, "rb", opener=_open_without_waiting) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
                raise _unreadable_error(
                    path, f"is no safetensors file, or cut short: {size:,} bytes"
                )
            content = json.loads(file.read(length).decode("utf-8"))
    except OSError as error:
        raise _unreadable_error(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _unreadable_error(path, f"has no safetensors header ({error!s:.80})") from None
    if not isinstance(content, dict):
        raise _unreadable_error(path, "has no safetensors header")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _unreadable_error(path, "has a broken __metadata__: it maps names to texts")
    found, ranges = {}, []
    for name, entry in content.items():
        found[name], start, end = _parse_entry(path, name, entry)
        ranges.append((start, end, name))
    end, before = 0, ""
    for start, next_end, name in sorted(ranges):
        if start != end:
            how = f"overlap those of {before}" if start < end else "leave a gap before them"
            raise _unreadable_error(path, f"has a broken header: the bytes of {name} {how}")
        end, before = next_end, name
    if 8 + length + end != size:
        raise _unreadable_error(
            path, f"has {size:,} bytes, and its header speaks of {8 + length + end:,}: cut short?"
        )
    return found


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int, int]:
    """Return a tensor, with the start and end of its bytes."""
    try:
        tensor = StoredTensor(path.name, str(entry["dtype"]), tuple(map(int, entry["shape"])))
        start, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise _unreadable_error(path, f"has a broken entry for {name}") from None
    is_known = tensor.dtype in WIDTHS
    if start < 0 or min(tensor.shape, default=0) < 0 or end < start:
        raise _unreadable_error(path, f"has a broken entry for {name}")
    if is_known and end - start != tensor.size_bytes:
        raise _unreadable_error(path, f"has {end - start:,} bytes for {name}, which needs others")
    return tensor, start, end


def _unreadable_error(path: Path, why: str) -> TrainctlError:
    return TrainctlError(
        f"{path} {why}",
        hint="copy or download the directory again, or start from random weights with "
        "model.weights=random",
    )


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_RANGES = re.compile(r"\{(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\}")
_ENTRY = re.compile(r"(\S+) (\S.*)")
_BLOCK = re.compile(r"\.(\d+)(?:\.|$)")

MOST_TENSORS = 1_000_000
"""Bound far above every model, and low enough that a table is read quickly."""

Entry = tuple[str, str]


def to_table(entries: Iterable[Entry]) -> list[str]:
    """Return the table of pairs of a name and its description."""
    merged = list(entries)
    most = max((len(_NUMBER.findall(name)) for name, _ in merged), default=0)
    # The rightmost number first: numbers to its left still keep entries apart as text.
    for _ in range(most):
        merged = _merge_entries(merged)
    return [f"{name} {said}" for name, said in merged]


def _merge_entries(entries: list[Entry]) -> list[Entry]:
    """Merge entries that differ only in the last plain number of their names."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, said in entries:
        found = list(_NUMBER.finditer(name))
        if not found:
            groups[name, "", said] = []
            continue
        last = found[-1]
        key = (name[: last.start()], name[last.end() :], said)
        groups.setdefault(key, []).append(int(last[0]))
    return [
        (f"{before}{{{_ranges_text(numbers)}}}{after}" if numbers else before, said)
        for (before, after, said), numbers in groups.items()
    ]


def _ranges_text(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def from_table(table: Sequence[str]) -> tuple[Entry, ...]:
    """Return the entries of a table: those before the blocks, then block by block, then others.

    Raises:
        TrainctlError: An entry is malformed, or there are more than `MOST_TENSORS`.
    """
    before: list[Entry] = []
    blocks: dict[int, list[Entry]] = {}
    after: list[Entry] = []
    count = 0
    for entry in table:
        for name, said in _expand_entry(entry):
            count += 1
            if count > MOST_TENSORS:
                raise TrainctlError(f"model.anatomy: more than {MOST_TENSORS:,} tensors")
            found = _BLOCK.search(name)
            if found is not None:
                blocks.setdefault(int(found[1]), []).append((name, said))
            else:
                (after if blocks else before).append((name, said))
    inside = [entry for index in sorted(blocks) for entry in blocks[index]]
    return (*before, *inside, *after)


def _expand_entry(entry: str) -> Iterator[Entry]:
    """Yield the entries that one line of the table stands for."""
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise TrainctlError(f"model.anatomy: {entry!r} is no name and what is said of it")
    name, said = found.groups()
    start, *rest = _RANGES.split(name)
    numbers = [_parse_numbers(ranges) for ranges in rest[::2]]
    if prod(sum(map(len, ranges)) for ranges in numbers) > MOST_TENSORS:
        raise TrainctlError(
            f"model.anatomy: {entry!r} stands for more than {MOST_TENSORS:,} tensors"
        )
    for chosen in product(*([n for each in ranges for n in each] for ranges in numbers)):
        pieces = zip(map(str, chosen), rest[1::2], strict=True)
        yield start + "".join(number + text for number, text in pieces), said


def _parse_numbers(ranges: str) -> list[range]:
    """Parse the numbers of `0-3,5`."""
    ends = [tuple(map(int, each.split("-"))) for each in ranges.split(",")]
    return [range(each[0], each[-1] + 1) for each in ends]
