"""Decompression of corpus files by their first bytes: gzip, bzip2, xz and zstd.

A file may be several concatenated streams, as `cat` and parallel compressors produce. A file that
ends within a stream is an error and not a shorter text; so is excessive expansion.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from trainctl.errors import TrainctlError
from trainctl.readers.remote import File, import_optional

COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
MOST_GROWTH = 250
"""Maximum decompressed bytes per compressed byte; text has 3 to 30, a log of one repeated line
100.
"""
ALWAYS_ALLOWED = 1 << 26
"""Decompressed bytes that any file may have."""
_XZ_MEMORY = 1 << 30
"""Maximum bytes of a stream's dictionary: `xz -9` uses 64 MiB."""
_ZSTD_WINDOW = 1 << 31
"""Largest window that `zstd --long=31` can use."""
_IN = 1 << 14
"""Compressed bytes read at once."""
_OUT = 1 << 18
"""Maximum bytes decompressed at once, except for zstd."""
_ZSTD_IN = 1 << 11
"""Compressed bytes passed to zstd at once. A block takes at least 4 bytes and expands to at most
128 KiB (RFC 8878, 3.1.1.2.4), so these expand to at most 64 MiB.
"""

Step = tuple[bytes, bytes, bool]
"""Decompressed bytes, the remaining compressed bytes, and whether the stream has ended."""


class DamagedFile(TrainctlError):
    """A file that is malformed, truncated, or expands beyond all bounds."""


def open_decompressed(file: File) -> BinaryIO:
    """Open a file, decompressed if it is compressed; only uncompressed files are seekable.

    Raises:
        OSError: It cannot be opened.
        DamagedFile: While reading.
        TrainctlError: The package that decompresses it is missing.
    """
    stream = file.open("rb")
    try:
        found = detect_compression(stream.read(6))
        stream.seek(0)
        if found is None:
            return stream
        name, make = found
        return cast(
            BinaryIO, io.BufferedReader(_DecompressedStream(stream, make(), name, str(file)), _OUT)
        )
    except BaseException:
        stream.close()
        raise


def read_head(file: File, size: int) -> bytes:
    """Return the first decompressed bytes of a file."""
    with open_decompressed(file) as stream:
        return stream.read(size)


def is_compressed(file: File) -> bool:
    """Whether a file is compressed, so that its size is not the size of its text."""
    with file.open("rb") as stream:
        return detect_compression(stream.read(6)) is not None


def uncompressed_name(file: File) -> str:
    """Return a file's name without a compression ending: ``a.jsonl`` for ``a.jsonl.zst``."""
    path = PurePosixPath(file.name)
    return path.stem if path.suffix in COMPRESSION_SUFFIXES else path.name


def detect_compression(head: bytes) -> tuple[str, Callable[[], _Decompressor]] | None:
    """Return the compression of a file with these first bytes, and a decompressor's factory.

    None if it is not compressed.
    """
    if head.startswith(b"\x1f\x8b"):
        return "gzip", _Gzip
    if head.startswith(b"BZh") and head[3:4].isdigit():
        return "bzip2", lambda: _Buffered(bz2.BZ2Decompressor)
    if head.startswith(b"\xfd7zXZ\x00"):
        return "xz", lambda: _Buffered(
            lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
        )
    # A zstd frame, or a skippable frame, which may precede it.
    is_skipped = head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    if head.startswith(b"\x28\xb5\x2f\xfd") or is_skipped:
        return "zstd", _Zstd
    return None


class _Decompressor:
    """Decompressor of consecutive streams: `begin` each, then `decompress` until it has ended."""

    padding = b""
    """Bytes that may fill a file after its last stream."""

    @property
    def is_hungry(self) -> bool:
        """Whether it has consumed all its input."""
        return True

    def begin(self) -> None:
        raise NotImplementedError

    def decompress(self, packed: bytes) -> Step:
        """Decompress some of the input; an empty input flushes bytes that are held back."""
        raise NotImplementedError


class _Gzip(_Decompressor):
    padding = b"\x00"

    def begin(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    def decompress(self, packed: bytes) -> Step:
        found = self._stream.decompress(packed, _OUT)
        rest = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        return found, rest, self._stream.eof


class _Buffered(_Decompressor):
    """Decompressor for bzip2 and xz, whose library objects keep unused input themselves."""

    padding = b"\x00"

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @property
    def is_hungry(self) -> bool:
        return bool(self._stream.needs_input)

    def begin(self) -> None:
        self._stream = self._make()

    def decompress(self, packed: bytes) -> Step:
        found = self._stream.decompress(packed, _OUT)
        return found, self._stream.unused_data, self._stream.eof


class _Zstd(_Decompressor):
    def __init__(self) -> None:
        self._package = import_optional("zstandard", "reading zstd")

    def begin(self) -> None:
        whole = self._package.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._stream = whole.decompressobj()

    def decompress(self, packed: bytes) -> Step:
        found = self._stream.decompress(packed[:_ZSTD_IN])
        return found, self._stream.unused_data + packed[_ZSTD_IN:], self._stream.eof


class _DecompressedStream(io.RawIOBase):
    """Raw stream of a compressed file's decompressed bytes."""

    def __init__(self, packed: BinaryIO, unpack: _Decompressor, kind: str, name: str) -> None:
        self._packed = packed
        self._unpack = unpack
        self._kind = kind
        self._name = name
        self._rest = b""
        self._ready = memoryview(b"")
        self._within = False
        self._streams = self._bytes_in = self._bytes_out = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._ready:
            self._ready = memoryview(self._read_more())
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._packed.close()
        super().close()

    def _read_more(self) -> bytes:
        """Return more decompressed bytes; empty at the end of the file."""
        while True:
            if not self._within and not self._begin_stream():
                return b""
            is_over = False
            if not self._rest and self._unpack.is_hungry:
                self._rest = self._packed.read(_IN)
                self._bytes_in += len(self._rest)
                is_over = not self._rest
            try:
                found, self._rest, has_ended = self._unpack.decompress(self._rest)
            except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
                raise self._broken_error(error) from None
            except Exception as error:
                if type(error).__name__ != "ZstdError":
                    raise
                raise self._broken_error(error) from None
            self._within = not has_ended
            self._streams += has_ended
            self._bytes_out += len(found)
            self._refuse_growth()
            if found:
                return found
            if is_over and self._within:
                raise DamagedFile(
                    f"{self._name} is cut off: its {self._kind} stream has no end after "
                    f"{self._bytes_in:,} bytes, {self._bytes_out:,} unpacked",
                    hint="fetch or write it again",
                )

    def _begin_stream(self) -> bool:
        """Skip padding, and begin the next stream; False at the end of the file."""
        while True:
            if self._streams:
                self._rest = self._rest.lstrip(self._unpack.padding)
            if self._rest:
                break
            self._rest = self._packed.read(_IN)
            self._bytes_in += len(self._rest)
            if not self._rest:
                return False
        self._unpack.begin()
        self._within = True
        return True

    def _broken_error(self, error: Exception) -> DamagedFile:
        return DamagedFile(
            f"{self._name} is damaged: its {self._kind} stream breaks within the first "
            f"{self._bytes_in:,} bytes ({error})",
            hint="fetch or write it again",
        )

    def _refuse_growth(self) -> None:
        if self._bytes_out > max(ALWAYS_ALLOWED, MOST_GROWTH * self._bytes_in):
            raise DamagedFile(
                f"{self._name} is no text: {self._bytes_in:,} bytes become more than "
                f"{self._bytes_out:,} when they are unpacked",
                hint="leave it out of data.paths, or unpack it yourself",
            )
