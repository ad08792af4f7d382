"""The manifest of a checkpoint, and checks of the checkpoint's files against it. No torch.

A manifest may be damaged or forged, so nothing in it is believed before it is checked.
`read_manifest` returns it only if its own checksum is right, every field is well-formed, the
fragments make up every parameter, and every file has its size; `verify_files` reads the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from trainctl.runs.files import write_json
from trainctl.untrusted import is_count, is_finite, safe_name

FORMAT = 2
"""Version of the manifest and of the files that it lists.

Version 1 named neither its run nor its model; it can still be read.
"""

MANIFEST = "manifest.json"

LARGEST_MANIFEST = 256 << 20
"""Largest manifest in bytes: above a million fragments, and still read in seconds."""

LARGEST_HEADER = 100 << 20
"""Largest safetensors header in bytes, the limit of the safetensors library."""

DIGEST = "sha256"
"""Key of the manifest's own checksum, over everything else in it."""

NAME = re.compile(r"(step|weights)-(\d{8,})")
"""Name of a checkpoint's folder: `step-…` for the whole state, `weights-…` for the weights alone.
"""


def is_name_of(name: str, step: int, *, weights_only: bool) -> bool:
    """Return True if a folder of this name holds the checkpoint of a step and kind."""
    found = NAME.fullmatch(name)
    return (
        found is not None
        and len(name) <= 32
        and int(found[2]) == step
        and (found[1] == "weights") == weights_only
    )


UNFINISHED = "unfinished"
"""Manifest entry with the hooks after the step that had not run when the checkpoint was saved, and
the facts of the step that they read; empty if all had.
"""

AMENDED = (UNFINISHED, "metrics", "learning_rate", "patience", "callbacks")
"""Manifest entries that may be replaced once the hooks have run."""

Fragments = dict[str, list[dict[str, Any]]]


def write_manifest(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint, with the checksum of its own content.

    Raises:
        OSError: The disk is full, the folder is gone, or the manifest is too large to be read
            again.
    """
    write_json(folder / MANIFEST, {**fields, DIGEST: digest(fields)})
    size = (folder / MANIFEST).stat().st_size
    if size > LARGEST_MANIFEST:
        raise OSError(f"{MANIFEST} has {size:,} bytes, and only {LARGEST_MANIFEST:,} are read")


def amend_manifest(folder: Path, entries: Mapping[str, Any]) -> None:
    """Replace some of the `AMENDED` entries of a committed checkpoint's manifest, atomically.

    Raises:
        ValueError: The checkpoint is gone or damaged.
        OSError: The manifest cannot be written; the old one stays.
    """
    write_manifest(folder, {**read_manifest(folder), **entries})


def identity_digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest that stays the same when the manifest is amended."""
    if UNFINISHED not in manifest:  # of a trainctl that amended none
        return digest(manifest)
    return digest({name: value for name, value in manifest.items() if name not in AMENDED})


def digest(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, independent of the layout of their text."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path, run_id: str | None = None) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder, checked.

    Args:
        path: The folder. If it has a checkpoint's name, the manifest must be of that step and kind.
        run_id: Id of the run that the checkpoint must belong to; None accepts any run.

    Raises:
        ValueError: It is missing, damaged, of a newer format or of something else, or a listed file
            is not there with its size; says which.
    """
    try:
        manifest = json.loads(_read_content(path / MANIFEST), parse_constant=_refuse)
        if not isinstance(manifest, dict):
            raise ValueError("no JSON object")
        claimed, actual = manifest.pop(DIGEST, None), digest(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: manifest is not readable ({error})") from None
    version = manifest.get("format")
    if type(version) is int and version > FORMAT:
        raise ValueError(
            f"{path.name}: format {version} is newer than this trainctl reads ({FORMAT})"
        )
    if claimed != actual:
        raise ValueError(f"{path.name}: {MANIFEST} is damaged (its checksum does not match)")
    try:
        validate_manifest(manifest)
    except ValueError as error:
        raise ValueError(f"{path.name}: not a manifest: {error}") from None
    _check_place(path, manifest, run_id)
    for entry in manifest["files"]:
        size = _size(path / entry["name"])
        if size != entry["bytes"]:
            problem = "is missing" if size is None else f"has {size} bytes, not {entry['bytes']}"
            raise ValueError(f"{path.name}: {entry['name']} {problem}")
    return manifest


def is_old(manifest: Mapping[str, Any]) -> bool:
    """Return True if the manifest's format does not name its run and model."""
    return int(manifest["format"]) < FORMAT


def _check_place(path: Path, manifest: Mapping[str, Any], run_id: str | None) -> None:
    """Raise if the folder's name, or the run, is another one's: it was renamed, or copied there."""
    name = NAME.fullmatch(path.name)
    if name is not None and int(name[2]) != manifest["step"]:
        raise ValueError(f"{path.name}: its manifest is of step {manifest['step']}")
    if name is not None and (name[1] == "weights") != manifest.get("weights_only", False):
        held = "the weights alone" if manifest.get("weights_only", False) else "the whole state"
        raise ValueError(f"{path.name}: its manifest is of {held}")
    of = manifest.get("run")  # format 1 lacks it
    if None not in (run_id, of) and of != run_id:
        raise ValueError(
            f"{path.name}: it is of another run (model.initial_weights starts a new run from it)"
        )


def _read_content(file: Path) -> bytes:
    """Return the content of the manifest.

    Raises for anything but a regular file (reading a pipe may block) and for one that is too large.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no file")
        if found.st_size > LARGEST_MANIFEST:
            raise ValueError(f"it has {found.st_size:,} bytes")
        return stream.read(LARGEST_MANIFEST)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _size(file: Path) -> int | None:
    """Return the size of a regular file in bytes; None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def verify(path: Path, run_id: str | None = None) -> list[str]:
    """Read every byte of a checkpoint, and return what is wrong; empty if it is intact."""
    try:
        manifest = read_manifest(path, run_id)
    except ValueError as error:
        return [str(error)]
    return verify_files(path, manifest, manifest["files"])


def verify_files(
    path: Path, manifest: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return what is wrong with some of a checkpoint's files, apart from their sizes.

    Args:
        entries: Entries of the files to read; ranks divide the work by these.
    """
    inside: dict[str, list[Mapping[str, Any]]] = {}
    for fragment in manifest["fragments"]:
        inside.setdefault(fragment["file"], []).append(fragment)
    for buffer in manifest.get("buffers", []):
        inside.setdefault(buffer["file"], []).append(buffer)
    problems = (
        _verify_file(path / entry["name"], entry["sha256"], inside.get(entry["name"], ()))
        for entry in entries
    )
    return [f"{path.name}: {problem}" for problem in problems if problem]


def _verify_file(file: Path, checksum: str, fragments: Iterable[Mapping[str, Any]]) -> str:
    """Return what is wrong with a file, or with the manifest's ranges in it; may be empty."""
    try:
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != checksum:
                return f"{file.name} is damaged (its checksum does not match)"
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            tensors = json.loads(stream.read(min(length, LARGEST_HEADER)))
            return _misplaced_range(file, fragments, _numels(tensors))
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return f"{file.name} is not a safetensors file"


def _numels(header: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of elements of each tensor in a safetensors file; all tensors are flat."""
    return {name: int(tensor["shape"][0]) for name, tensor in header.items() if tensor["shape"]}


def _misplaced_range(
    file: Path, fragments: Iterable[Mapping[str, Any]], numels: dict[str, int]
) -> str:
    """Return the first range of the manifest that the file's tensors do not hold, if any."""
    for fragment in fragments:
        if "key" in fragment:  # a buffer, which is a tensor by itself
            name, ranges = fragment["name"], {fragment["key"]: fragment["numel"]}
        else:
            name = fragment["parameter"]
            ranges = {f"master/{fragment['tensor']}": fragment["offset"] + fragment["numel"]}
            ranges |= {key: numel for _, numel, key in fragment.get("sides", {}).values()}
        for key, end in ranges.items():
            if numels.get(key, 0) < end:
                return f"{file.name} has no {key} of {end} elements ({name})"
    return ""


Check = Callable[[Any], bool]
"""Returns True if a value is well-formed for a field."""

Block = tuple[int, int, int]
"""A shard (width, start, stop): columns [start, stop) of the flattened parameter viewed as rows of
`width` elements.
"""


def validate_manifest(manifest: Mapping[str, Any]) -> None:
    """Check every field that is read anywhere; other fields are for later versions.

    Raises:
        ValueError: A field is missing or malformed, or the fragments do not make up the parameters;
            says which.
    """
    for name, check in _FIELDS.items():
        if name not in manifest:
            raise ValueError(f"it has no {name}")
        _require(name, manifest[name], check)
    is_required = _SINCE_2 if manifest["format"] > 1 else {}
    for name, check in (_SINCE_2 | _OPTIONAL).items():
        if name in manifest or name in is_required:
            _require(name, manifest.get(name), check)
    files = [entry["name"] for entry in manifest["files"]]
    if not files or len(set(files)) < len(files):
        raise ValueError("its files are none, or one is listed twice")
    _check_fragments(manifest, set(files))
    for entry in manifest.get("buffers", []):
        if entry["file"] not in files:
            raise ValueError(f"{entry['name']} is in {entry['file']}, which is not listed")


def _require(name: str, value: Any, check: Check) -> None:
    if not check(value):
        shown = repr(value)
        raise ValueError(f"{name} is {shown if len(shown) < 60 else shown[:57] + '...'}")


def _is_text(value: Any) -> bool:
    """Return True for a string without control characters, which a terminal can show."""
    return type(value) is str and (value == "" or value.isprintable())


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _mapping_of(check: Check) -> Check:
    return lambda value: (
        type(value) is dict and all(map(_is_text, value)) and all(map(check, value.values()))
    )


def _tuple_of(*checks: Check) -> Check:
    """Return a check for a list with one value for each check."""
    return lambda value: (
        type(value) is list
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def _object_with(needed: Mapping[str, Check], **optional: Check) -> Check:
    """Return a check for a mapping with fields; it may have others, for later versions."""
    return lambda value: (
        type(value) is dict
        and all(check(value.get(name)) for name, check in needed.items())
        and all(check(value[name]) for name, check in optional.items() if name in value)
    )


def _empty_or_has(*names: str) -> Check:
    """Return a check for an empty mapping, or a mapping of numbers with at least these names."""
    numbers = _mapping_of(is_finite)
    return lambda value: value == {} or (numbers(value) and set(names) <= value.keys())


def _is_list_of_states(value: Any) -> bool:
    return _list_of(_is_text)(value) and "master" in value


def _is_file_name(value: Any) -> bool:
    """Return True for a plain file name, which cannot lead out of its folder."""
    with suppress(ValueError):
        return bool(safe_name(value))
    return False


def _is_shard(value: Any) -> bool:
    return _tuple_of(*[is_count] * 3)(value) and value[1] < value[2] <= value[0]


_FILE = _object_with({"name": _is_file_name, "bytes": is_count, "sha256": _is_text})

_FRAGMENT = _object_with(
    {
        **dict.fromkeys(("parameter", "file"), _is_text),
        **dict.fromkeys(("start", "numel", "tensor", "offset"), is_count),
    },
    shard=_is_shard,
    sides=_mapping_of(_tuple_of(is_count, is_count, _is_text)),
)

_BUFFER = _object_with({"name": _is_text, "file": _is_text, "key": _is_text, "numel": is_count})

_MEAN = _tuple_of(is_finite, is_finite)
_STABILITY = _object_with({}, loss=_MEAN, norm=_MEAN, in_a_row=is_finite, bad_step=is_finite)
"""State of spike detection: running means with counts, and counters."""

_PATIENCE = _empty_or_has("best", "best_step", "evaluations_since")

_LEARNING_RATE = _object_with({}, cut=is_finite, drops=is_finite, patience=_PATIENCE)
"""Changes that evaluations and rewinds made to the learning-rate schedule."""

_MODEL = _object_with({"configuration": lambda value: type(value) is dict, "sha256": _is_text})

_FROZEN_BASES = {
    "seed": _object_with({"seed": is_count}, sha256=_is_text),
    "checkpoint": _object_with({"path": _is_text, "sha256": _is_text}),
    "directory": _object_with(
        {"path": _is_text, "files": _mapping_of(_tuple_of(is_count, _is_text))}
    ),
}
"""Origin of frozen weights, by its `kind`."""


def _is_frozen_base(value: Any) -> bool:
    kinds = _FROZEN_BASES.items()
    return type(value) is dict and any(
        value.get("kind") == kind and check(value) for kind, check in kinds
    )


_FIELDS: dict[str, Check] = {
    "format": lambda value: is_count(value) and value > 0,
    "step": is_count,
    "samples": is_count,
    "tokens": is_count,
    "metrics": _mapping_of(is_finite),
    "corpus_digest": _is_text,
    "shapes": _mapping_of(_list_of(is_count)),
    "states": _is_list_of_states,
    "scalars": _mapping_of(is_finite),
    "files": _list_of(_FILE),
    "fragments": _list_of(_FRAGMENT),
}
_SINCE_2: dict[str, Check] = {
    "run": _is_text,
    "model": _MODEL,
    "weights_only": lambda value: type(value) is bool,
}
_OPTIONAL: dict[str, Check] = {
    "trainctl": _is_text,
    "attempt": is_count,
    "kept_for": _is_text,
    "patience": _PATIENCE,
    "source_digests": _mapping_of(_is_text),
    "layout": _mapping_of(is_count),
    "loss_scale": _empty_or_has("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"),
    "stability": _STABILITY,
    "divergence": _empty_or_has("best", "start"),
    "norms": _list_of(is_finite),
    "ema": _empty_or_has("steps"),
    "learning_rate": _LEARNING_RATE,
    UNFINISHED: _object_with(
        {},
        hooks=_list_of(_tuple_of(_is_text, _is_text)),
        **dict.fromkeys(("loss", "grad_norm", "factor"), is_finite),
    ),
    "buffers": _list_of(_BUFFER),
    "base": _is_frozen_base,
    "adapter": lambda value: type(value) is dict and all(map(_is_text, value)),
    "multipliers": lambda value: bool(value) and _empty_or_has("output", "attention")(value),
}


def _check_fragments(manifest: Mapping[str, Any], files: set[str]) -> None:
    """Raise unless every element of every parameter is in a fragment."""
    shapes = manifest["shapes"]
    if not shapes:
        raise ValueError("it has no parameter")
    ranges: dict[str, dict[Block, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for fragment in manifest["fragments"]:
        name, start = fragment["parameter"], fragment["start"]
        if name not in shapes:
            raise ValueError(f"a fragment is of {name}, which has no shape")
        if fragment["file"] not in files:
            raise ValueError(f"{name} is in {fragment['file']}, which is not listed")
        whole = math.prod(shapes[name])
        block = tuple(fragment["shard"]) if "shard" in fragment else (whole, 0, whole)
        ranges[name][block].append((start, start + fragment["numel"]))
    for name, shape in shapes.items():
        problem = _missing_part(math.prod(shape), ranges.get(name, {}))
        if problem:
            raise ValueError(f"{name} is not all there: {problem}")


def _missing_part(numel: int, blocks: Mapping[Block, list[tuple[int, int]]]) -> str:
    """Return which part of a parameter no fragment holds; empty if fragments hold all of it."""
    if numel == 0:
        return ""
    column, rows = 0, {row for row, _, _ in blocks}
    if len(rows) != 1 or numel % (row := rows.pop()):
        return "its shards do not make it up" if blocks else "it has no fragment"
    for _, start, stop in sorted(blocks):
        if start != column:
            return "its shards do not make it up"
        column = stop
    if column != row:
        return "its shards do not make it up"
    for (_, start, stop), ranges in blocks.items():
        end = 0
        for first, last in sorted(ranges):
            if first > end:
                break
            end = max(end, last)
        if end != numel // row * (stop - start):
            return f"its elements are there up to {end:,} of {numel // row * (stop - start):,}"
    return ""
