"""The manifest of a checkpoint, and checks of the checkpoint's files against it. No torch.

A manifest may be damaged or forged, so nothing in it is believed before it is checked.
`read_manifest` returns it only if its own checksum is right, every field is well-formed, the
fragments make up every parameter, and every file has its size; `verify_files` reads the bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from trainctl.runs.files import write_json
from trainctl.runs.manifest_form import validate_manifest

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
        manifest = json.loads(_content(path / MANIFEST), parse_constant=_refuse)
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


def _content(file: Path) -> bytes:
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
            return _misplaced(file, fragments, _numels(tensors))
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return f"{file.name} is not a safetensors file"


def _numels(header: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of elements of each tensor in a safetensors file; all tensors are flat."""
    return {name: int(tensor["shape"][0]) for name, tensor in header.items() if tensor["shape"]}


def _misplaced(file: Path, fragments: Iterable[Mapping[str, Any]], numels: dict[str, int]) -> str:
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
