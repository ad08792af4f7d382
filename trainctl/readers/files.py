"""Files of a corpus: lookup, detection of binary formats, and the held-out split.

Nothing is tokenized and no torch is imported here: a launch checks files before it takes a device.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from trainctl.config.reading import special_file_type
from trainctl.config.registry import load_spec
from trainctl.config.schema import DataConfig, DataFromPaths, HeldOutBy
from trainctl.config.secrets import redact_text
from trainctl.errors import TrainctlError
from trainctl.models.local_path import is_file, is_folder, local_path
from trainctl.readers.remote import File, RemoteFile, is_url, list_url
from trainctl.readers.stream import uncompressed_name

HEAD_BYTES = 1 << 16
"""Bytes at the start of a file that are enough to detect its format."""

# First bytes of a format, its name, and a hint for getting text out of it.
_UNPACK = "unpack it first: {}"
_KIND = "read it with data={}"
_LEAVE_OUT = "leave it out of data.paths, or get its text out first"
_MAGIC = (
    (b"\x04\x22\x4d\x18", "lz4-compressed", _UNPACK.format("lz4 -d FILE TEXT")),
    (b"PK\x03\x04", "a zip archive", _UNPACK.format("unzip FILE")),
    (b"PK\x05\x06", "a zip archive", _UNPACK.format("unzip FILE")),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK.format("7z x FILE")),
    (b"PAR1", "Parquet", _KIND.format("parquet")),
    (b"ARROW1", "Arrow", _KIND.format("arrow")),
    (b"\xff\xff\xff\xff", "Arrow, or otherwise binary", _KIND.format("arrow")),
    (b"%PDF-", "PDF", _LEAVE_OUT),
    (b"\x89PNG", "a PNG image", _LEAVE_OUT),
    (b"\xff\xd8\xff", "a JPEG image", _LEAVE_OUT),
    (b"\xff\xfe", "UTF-16 text", "make it UTF-8: iconv -f utf-16 -t utf-8 FILE"),
    (b"\xfe\xff", "UTF-16 text", "make it UTF-8: iconv -f utf-16 -t utf-8 FILE"),
)


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Files of a corpus, each list sorted by path."""

    train: list[File]
    held_out: list[File]
    by_document: bool = False
    """Whether documents of the files in `train` are held out, and no file as a whole."""


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """Files that a path, glob or URL of `data.paths` refers to."""

    files: list[File]
    """Resolved and sorted; local files first."""
    left_out: Counter[str]
    """Number of the folder's other files, by ending."""
    is_folder: bool = False


Choose = Callable[[list[File]], list[File]]
"""Function that selects a kind's corpus from all files of a folder. The other files are not
reported as left out.
"""


def find_files(pattern: str, endings: Sequence[str], choose: Choose | None = None) -> FoundFiles:
    """Return the files of a path, a folder, a glob, or a URL of one of these; possibly none.

    A folder stands for its files with these endings, compressed or not, at any depth, without
    hidden ones. A glob stands for the files that match, and does not descend into folders that
    match.

    Args:
        choose: Selects from a folder's files before the endings do.

    Raises:
        TrainctlError: A URL that cannot be listed, or a path that is no regular file.
    """
    files: list[File]
    if is_url(pattern) and not pattern.startswith("file://"):
        remote, is_whole = list_url(pattern)
        files = [*remote]
        root: PurePath = PurePosixPath(pattern)
    else:
        path = local_path(pattern.removeprefix("file://"))
        is_whole, root = is_folder(path), path
        special = special_file_type(path)
        if special:
            raise TrainctlError(
                f"{path} is {special}, no regular file", hint="copy what is in it into a file"
            )
        if is_whole:
            files = [*_in_folder(path)]
        else:
            matches = [path] if is_file(path) else _glob_paths(path)
            files = [*{match.resolve() for match in matches if _is_regular(match)}]
    if not is_whole:
        return FoundFiles(sorted(files, key=file_sort_key), Counter())
    visible = [file for file in files if not _is_hidden(file, root)]
    chosen = choose(visible) if choose is not None else visible
    taken = {file for file in chosen if uncompressed_name(file).endswith(tuple(endings))}
    left_out = Counter(file.suffix or "no ending" for file in chosen if file not in taken)
    resolved = {file.resolve() if isinstance(file, Path) else file for file in taken}
    return FoundFiles(sorted(resolved, key=file_sort_key), left_out, is_folder=True)


def file_sort_key(file: File) -> tuple[bool, File]:
    """Return a sort key that puts local files before remote ones."""
    return isinstance(file, RemoteFile), file


def _glob_paths(path: Path) -> list[Path]:
    return [Path(match) for match in glob.iglob(str(path), recursive=True)]  # noqa: PTH207


def _in_folder(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if _is_regular(file := Path(where, name)))


def _is_regular(path: Path) -> bool:
    return is_file(path) and not special_file_type(path)


def _is_hidden(file: File, folder: PurePath) -> bool:
    inside = PurePosixPath(str(file)).parts[len(PurePosixPath(str(folder)).parts) :]
    return any(part.startswith(".") for part in inside)


def split_files(config: DataConfig) -> TextFiles:
    """Return the files to train on and the held-out files.

    With `data.held_out_by=file`, several files are held out by a hash of their names, so that
    adding a file changes the split little.

    Raises:
        TrainctlError: A path or glob without a file.
    """
    spec = load_spec("data", config.kind)
    if isinstance(config, DataFromPaths):
        files = _find_all(config.paths, "data.paths", spec)
        if config.held_out_paths:
            held_out = _find_all(config.held_out_paths, "data.held_out_paths", spec)
            return TextFiles([file for file in files if file not in set(held_out)], held_out)
    else:
        files = [*spec.files(config)]
    if config.held_out_fraction == 0:
        return TextFiles(files, [])
    if len(files) == 1 or config.held_out_by is HeldOutBy.record:
        return TextFiles(files, [], by_document=True)
    root = os.path.commonpath([_rooted_path(file).parent for file in files])
    by_hash = sorted(files, key=lambda file: digest_of(str(_rooted_path(file).relative_to(root))))
    count = max(1, round(len(files) * config.held_out_fraction))
    return TextFiles(
        sorted(by_hash[count:], key=file_sort_key), sorted(by_hash[:count], key=file_sort_key)
    )


def _rooted_path(file: File) -> PurePath:
    """Return the path of a file, with URLs placed under the root."""
    return file if isinstance(file, Path) else PurePosixPath("/", str(file))


def digest_of(text: str) -> str:
    """Return the SHA-256 of a text, which may be a path with bytes that are not UTF-8."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()


def _find_all(patterns: list[str], key: str, spec: Any) -> list[File]:
    files: set[File] = set()
    for pattern in patterns:
        found = find_files(pattern, spec.endings, spec.choose)
        if not found.files:
            message = f"{key}: {no_files_message(pattern, found, spec.endings)}"
            raise TrainctlError(message, hint=hint_for(found))
        files |= set(found.files)
    if not files:
        raise TrainctlError(f"{key} is empty", hint=f"{key}=['corpus/**/*.txt']")
    return sorted(files, key=file_sort_key)


def no_files_message(pattern: str, found: FoundFiles, endings: Sequence[str]) -> str:
    """Return the message for a path or glob without a file."""
    if not found.is_folder:
        return f"no file matches {redact_text(pattern)!r}"
    what = f"it has {describe_endings(found)}" if found.left_out else "it is empty"
    return f"no file in {redact_text(pattern)} ends in {', '.join(endings)}: {what}"


def hint_for(found: FoundFiles) -> str:
    """Return the hint for a path or glob without a file."""
    if found.is_folder and found.left_out:
        endings = [ending for ending, _ in found.left_out.most_common() if ending.startswith(".")]
        return f"a glob takes files of any ending: FOLDER/**/*{endings[0] if endings else ''}"
    return "globs are relative to the folder of the launch; ** crosses folders"


def describe_endings(found: FoundFiles) -> str:
    """Describe the files left out of a folder: ``12 .gz, 1 .json``, most common first."""
    return ", ".join(f"{count:,} {ending}" for ending, count in found.left_out.most_common(5))


def binary_format(head: bytes) -> tuple[str, str] | None:
    """Return the format of a binary file, and a hint for it; None for text.

    Args:
        head: First `HEAD_BYTES` of the file, decompressed.
    """
    for magic, kind, hint in _MAGIC:
        if head.startswith(magic):
            return kind, hint
    if head[257:262] == b"ustar":
        return "a tar", _KIND.format("webdataset")
    if b"\x00" in head:
        return "binary (it has NUL bytes)", _LEAVE_OUT
    return None
