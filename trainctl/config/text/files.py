"""The files of a corpus: which ones a configuration means, what they are, which are held out.

Nothing is tokenized here and no torch imported: a launch looks before it takes a device.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainctl.config.registry import load
from trainctl.config.schema import DataConfig, DataFromPaths
from trainctl.errors import TrainctlError

HEAD_BYTES = 1 << 16
"""Of a file, that tell what it is."""

# What a file begins with, what that is called, and how to get text out of it.
_UNPACK = "unpack it first: {}"
_EXPORT = 'write its text as JSONL first: one {"text": ...} a line'
_LEAVE_OUT = "leave it out of data.paths, or get its text out first"
_MAGIC = (
    (b"\x1f\x8b", "gzip-compressed", _UNPACK.format("gunzip < FILE > TEXT")),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", _UNPACK.format("zstd --decompress < FILE > TEXT")),
    (b"\xfd7zXZ\x00", "xz-compressed", _UNPACK.format("unxz < FILE > TEXT")),
    (b"\x04\x22\x4d\x18", "lz4-compressed", _UNPACK.format("lz4 -d FILE TEXT")),
    (b"PK\x03\x04", "a zip archive", _UNPACK.format("unzip FILE")),
    (b"PK\x05\x06", "a zip archive", _UNPACK.format("unzip FILE")),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK.format("7z x FILE")),
    (b"PAR1", "Parquet", _EXPORT),
    (b"ARROW1", "Arrow", _EXPORT),
    (b"\xff\xff\xff\xff", "Arrow, or otherwise binary", _EXPORT),
    (b"%PDF-", "PDF", _LEAVE_OUT),
    (b"\x89PNG", "a PNG image", _LEAVE_OUT),
    (b"\xff\xd8\xff", "a JPEG image", _LEAVE_OUT),
    (b"\xff\xfe", "UTF-16 text", "make it UTF-8: iconv -f utf-16 -t utf-8 FILE"),
    (b"\xfe\xff", "UTF-16 text", "make it UTF-8: iconv -f utf-16 -t utf-8 FILE"),
)


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The files of a corpus, each list sorted by path.

    Attributes:
        train: Files to train on.
        held_out: Held-out files.
        by_document: Whether it is documents that are held out, of the one file in `train`: another
            file to hold out there is not.
    """

    train: list[Path]
    held_out: list[Path]
    by_document: bool = False


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """What a path or glob of `data.paths` means.

    Attributes:
        files: Resolved, sorted.
        left_out: What a folder has beside them: how many files of each other ending it has.
        is_folder: Whether it names one.
    """

    files: list[Path]
    left_out: Counter[str]
    is_folder: bool = False


def find(pattern: str, endings: Sequence[str]) -> FoundFiles:
    """The files of a path, a folder or a glob; perhaps none.

    A folder gives its files with these endings, and those of the folders in it, but for hidden
    ones. A glob takes what it matches, and does not go into the folders among it.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        return _in_folder(path, endings)
    matches = [path] if path.is_file() else _glob(path)
    return FoundFiles(sorted({match.resolve() for match in matches if match.is_file()}), Counter())


def _glob(path: Path) -> list[Path]:
    return [Path(match) for match in glob.iglob(str(path), recursive=True)]  # noqa: PTH207


def _in_folder(folder: Path, endings: Sequence[str]) -> FoundFiles:
    files: set[Path] = set()
    left_out: Counter[str] = Counter()
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(where, name)
            if name.startswith(".") or not file.is_file():
                continue
            if file.suffix in endings:
                files.add(file.resolve())
            else:
                left_out[file.suffix or "no ending"] += 1
    return FoundFiles(sorted(files), left_out, is_folder=True)


def split_files(config: DataConfig) -> TextFiles:
    """The files to train on and the held-out files.

    Which file is held out is a function of its name alone, so that adding a file moves no other.

    Raises:
        TrainctlError: A path or glob without a file.
    """
    spec = load("data", config.kind)
    if isinstance(config, DataFromPaths):
        files = _all(config.paths, "data.paths", spec.endings)
        if config.held_out_paths:
            held_out = _all(config.held_out_paths, "data.held_out_paths", spec.endings)
            return TextFiles([file for file in files if file not in set(held_out)], held_out)
    else:
        files = spec.files(config)
    if config.held_out_fraction == 0:
        return TextFiles(files, [])
    if len(files) == 1:
        return TextFiles(files, [], by_document=True)
    root = Path(os.path.commonpath([file.parent for file in files]))
    by_hash = sorted(files, key=lambda file: digest_of(str(file.relative_to(root))))
    count = max(1, round(len(files) * config.held_out_fraction))
    return TextFiles(sorted(by_hash[count:]), sorted(by_hash[:count]))


def digest_of(text: str) -> str:
    """SHA-256 of a text, which may be a path with bytes in it that are no UTF-8."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()


def _all(patterns: list[str], key: str, endings: Sequence[str]) -> list[Path]:
    files: set[Path] = set()
    for pattern in patterns:
        found = find(pattern, endings)
        if not found.files:
            message = f"{key}: {nothing_in(pattern, found, endings)}"
            raise TrainctlError(message, hint=hint_for(found))
        files |= set(found.files)
    if not files:
        raise TrainctlError(f"{key} is empty", hint=f"{key}=['corpus/**/*.txt']")
    return sorted(files)


def nothing_in(pattern: str, found: FoundFiles, endings: Sequence[str]) -> str:
    """What is wrong with a path or glob that gives no file."""
    if not found.is_folder:
        return f"no file matches {pattern!r}"
    what = f"it has {endings_of(found)}" if found.left_out else "it is empty"
    return f"no file in {pattern} ends in {', '.join(endings)}: {what}"


def hint_for(found: FoundFiles) -> str:
    """What to write in place of a path or glob that gives no file."""
    if found.is_folder and found.left_out:
        endings = [ending for ending, _ in found.left_out.most_common() if ending.startswith(".")]
        return f"a glob takes files of any ending: FOLDER/**/*{endings[0] if endings else ''}"
    return "globs are relative to the folder of the launch; ** crosses folders"


def endings_of(found: FoundFiles) -> str:
    """What a folder has besides its texts, such as ``12 .gz, 1 .json``; the commonest first."""
    return ", ".join(f"{count:,} {ending}" for ending, count in found.left_out.most_common(5))


def no_text(head: bytes) -> tuple[str, str] | None:
    """What a file is, if it is no text, and what to do about it; None for text.

    Args:
        head: Its first `HEAD_BYTES`.
    """
    for magic, kind, hint in _MAGIC:
        if head.startswith(magic):
            return kind, hint
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return "bzip2-compressed", _UNPACK.format("bunzip2 < FILE > TEXT")
    if b"\x00" in head:
        return "binary (it has NUL bytes)", _LEAVE_OUT
    return None
