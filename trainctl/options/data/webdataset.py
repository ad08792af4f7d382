"""WebDataset: tars whose members of one sample share a name: `KEY.txt`, `KEY.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import BinaryIO

from trainctl.config.schema import DataFromRecords
from trainctl.config.schema.option import option
from trainctl.options.data import DataSource
from trainctl.readers.check import TEXT_KEY, FileProblem
from trainctl.readers.documents import Document, Reader
from trainctl.readers.plain import text_of_record
from trainctl.readers.remote import File
from trainctl.readers.stream import DamagedFile, open_decompressed
from trainctl.readers.tables import first_problem

_BLOCK = 512
"""Block size of a tar in bytes; two blocks of zeros end it (POSIX.1-2017, pax, «ustar
Interchange»).
"""
_READ = 1 << 20
_MEMBERS_READ = 1000
"""Members read of each tar before a start. A sample's members lie together, so one of them has a
text.
"""


def _is_json(section: WebDatasetConfig) -> bool:
    return section.member.rpartition(".")[2] == "json"


@dataclass
class WebDatasetConfig(DataFromRecords):
    """Keys of WebDataset."""

    text_key: str = option(
        "text",
        "Key of the text in a JSON object.",
        needs=(_is_json, "members of JSON, such as data.member=json"),
    )
    member: str = option(
        "txt",
        "Suffix of the tar members with the text, after the first dot of their names; for json, "
        "the text is under `text_key`.",
    )


def read(reader: Reader, file: File, *, most: int | None = None) -> Iterator[Document]:
    """Yield the texts of a tar's samples, in order, numbered from 1.

    Args:
        most: Number of members after which to stop; None reads all.

    Raises:
        TrainctlError: The tar is damaged, or none of its members has the ending; or the policy for
            bad text raises.
    """
    section = reader.config
    assert isinstance(section, WebDatasetConfig)
    number = 0
    endings: Counter[str] = Counter()
    with open_decompressed(file) as stream:
        watched = _CountingStream(stream)
        for name, raw in _members(watched, file, section.member, endings, most):
            number += 1
            where = f"{file}, {name}"
            if _is_json(section):
                text = text_of_record(reader, raw, where)
            else:
                text = reader.decoded(raw, where)
            if text is not None:
                yield Document(text, file, number)
    if number == 0 and endings:
        raise _NoMember(file, section.member, [ending for ending, _ in endings.most_common(12)])


def problem(file: File, section: WebDatasetConfig) -> FileProblem | None:
    """Return a problem of a tar's first samples; None if there is none."""
    try:
        return first_problem(file, section, partial(read, most=_MEMBERS_READ))
    except _NoMember as error:
        return FileProblem(TEXT_KEY, error.hint, error.message, error.hint, "data.member")


class _NoMember(DamagedFile):
    def __init__(self, file: File, member: str, endings: list[str]) -> None:
        super().__init__(
            f"{file}: no member's name ends in {member!r}: they end in "
            f"{', '.join(map(repr, endings))}",
            hint=f"data.member={endings[0]}",
        )


class _CountingStream:
    """A stream that counts bytes, to tell at its end whether the tar ended there.

    Attributes:
        size: Bytes read so far.
        filled: Bytes up to the last one that is not zero.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size = self.filled = 0

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end."""
        data = self._stream.read(size)
        used = len(data.rstrip(b"\x00"))
        if used:
            self.filled = self.size + used
        self.size += len(data)
        return data


def _members(
    watched: _CountingStream, file: File, ending: str, endings: Counter[str], most: int | None
) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each file in a tar with the ending; count the endings of all files.

    tarfile takes a header that is truncated or invalid for the end, so the end is checked.
    """
    import tarfile  # slower to import than all other options together

    try:
        with tarfile.open(fileobj=watched, mode="r|") as tar:  # type: ignore[call-overload]
            for member in tar:
                found = PurePosixPath(member.name).name.partition(".")[2]
                if member.isreg() and not member.issparse():
                    endings[found] += 1
                    if found == ending:
                        yield member.name, tar.extractfile(member).read()
                if endings.total() == most:
                    return
                tar.members = []  # tarfile would keep all members
            end = tar.offset
    except tarfile.TarError as error:
        raise DamagedFile(
            f"{file} is no tar, or cut off or damaged: {error}", hint="fetch or write it again"
        ) from None
    while watched.read(_READ):
        pass
    if watched.filled > end:
        raise DamagedFile(
            f"{file} is damaged at byte {end:,}, or tars one after the other: what follows there "
            "is no member",
            hint="fetch or write it again; join tars by `tar --concatenate`, not by cat",
        )
    if watched.size < end + 2 * _BLOCK:
        raise DamagedFile(
            f"{file} is cut off: it ends without an end mark, after {watched.size:,} bytes",
            hint="fetch or write it again",
        )


SPEC = DataSource(
    name="webdataset", keys=WebDatasetConfig, build=read, endings=(".tar",), problem=problem
)
