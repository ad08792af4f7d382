"""Files of `torch.save` and other pickles, read without running what is in them.

A pickle names functions and calls them. The unpickler here knows a short list of names, all of
which make plain values, and refuses every other one by its name. Objects of a few classes that
trainers save become `Record`s, which hold what was saved of them and have no behaviour.

Tensors are not read with the pickle: a `LazyTensor` reads ranges of elements from the file, so a
file may be larger than memory (torch/serialization.py; its zip entries are stored uncompressed).
Bytes that are read have their CRC-32 compared by `TorchFile.verify`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainctl.config.reading import open_file, read_bytes
from trainctl.errors import RunStateError, TrainctlError
from trainctl.migration.configs.pickled import Record
from trainctl.untrusted import safe_name

MOST_POINTER_BYTES = 4096
"""Largest file that names a folder."""

MOST_PICKLE_BYTES = 1 << 30
"""Largest pickle that is read: all names, shapes and places of a model's tensors are in it."""

PIECE_BYTES = 1 << 26
"""Bytes that are read at a time to complete a checksum."""


def damaged(path: Path, why: str) -> TrainctlError:
    """Return the error of a damaged or missing file of a foreign checkpoint (exit code 5)."""
    return RunStateError(
        f"{path}: {why}",
        hint="copy the checkpoint again, or take an older one",
    )


def as_numbers(values: torch.Tensor, place: Path, what: str) -> torch.Tensor:
    """Return values in fp32 if all of them are finite numbers of a floating-point type.

    Args:
        what: Name of the tensor, for errors.

    Raises:
        TrainctlError: They are not (exit code 5).
    """
    if not values.is_floating_point():
        raise damaged(place, f"{what} is of {values.dtype}, which no weight and no state has")
    numbers = values.to(torch.float32)
    if not bool(torch.isfinite(numbers).all()):
        raise damaged(place, f"{what} has values that are infinite or no numbers")
    return numbers


def read_pointer(pointer: Path) -> str:
    """Return the name of a folder that a file names (`latest`).

    Raises:
        TrainctlError: The file cannot be read, or holds no name of a folder beside it (exit code
            5).
    """
    try:
        return safe_name(read_bytes(pointer, most_bytes=MOST_POINTER_BYTES).decode().strip())
    except (OSError, ValueError) as error:
        raise damaged(pointer, f"it names no folder beside it ({error})") from None


@dataclass(eq=False)
class Storage:
    """Bytes of one tensor storage in a file."""

    path: Path
    offset: int
    num_bytes: int
    checksum: int
    """CRC-32 of the bytes, from the zip entry."""
    _checked: int = field(default=0, init=False)
    """Bytes from the start that `_crc` covers."""
    _crc: int = field(default=0, init=False)
    _is_used: bool = field(default=False, init=False)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` with the bytes from `start` on.

        Raises:
            TrainctlError: The file ends before, or cannot be read.
        """
        end = start + len(target)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(target):
                    got = os.preadv(descriptor, [target[done:]], self.offset + start + done)
                    if not got:
                        raise damaged(self.path, "it is truncated")
                    done += got
            finally:
                os.close(descriptor)
        except OSError as error:
            raise damaged(self.path, f"it cannot be read ({error.strerror})") from None
        self._is_used = True
        if start <= self._checked < end:
            self._crc = zlib.crc32(target[self._checked - start :], self._crc)
            self._checked = end

    def verify(self) -> None:
        """Compare the checksum of a storage that was read; bytes not read in order are read again.

        Raises:
            TrainctlError: It differs.
        """
        if not self._is_used:
            return
        buffer = bytearray(min(PIECE_BYTES, self.num_bytes))
        while self._checked < self.num_bytes:
            size = min(len(buffer), self.num_bytes - self._checked)
            self.read_into(memoryview(buffer)[:size], self._checked)
        if self._crc != self.checksum:
            raise damaged(self.path, "it is damaged (the checksum of a tensor does not match)")


@dataclass(frozen=True, eq=False, slots=True)
class LazyTensor:
    """A tensor in a file, not read yet."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First element in the storage."""
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements [start, end) of the flattened tensor, in its own type.

        A tensor that is not contiguous is read whole.

        Raises:
            TrainctlError: The file is truncated.
        """
        end = self.numel if end is None else end
        if not 0 <= start <= end <= self.numel:
            raise damaged(self.storage.path, f"a tensor in it has {self.numel:,} elements only")
        if self._is_contiguous:
            return self._elements(self.start + start, end - start)
        steps = zip(self.shape, self.stride, strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps) if self.numel else 0
        whole = self._elements(self.start, span).as_strided(self.shape, self.stride)
        return whole.reshape(-1)[start:end]

    def item(self) -> float:
        """Return the value of a tensor with one element."""
        return float(self.read(0, 1).item())

    @property
    def _is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def _elements(self, start: int, count: int) -> torch.Tensor:
        values = torch.empty(count, dtype=self.dtype)
        if count:
            target = memoryview(values.view(torch.uint8).numpy())
            self.storage.read_into(target, start * self.dtype.itemsize)
        return values


class _Span(io.RawIOBase):
    """Part of an open file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = (0, self._position, self._length)[whence]
        self._position = max(0, base + offset)
        return self._position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class TorchFile:
    """A file of `torch.save` in its zip format, whose tensors are read on demand.

    Attributes:
        content: What was saved; tensors are `LazyTensor`s.

    Args:
        records: Dotted names of further classes whose objects become `Record`s.
        span: Offset and length of the part of the file that is meant; None means all of it.

    Raises:
        TrainctlError: The file is missing, truncated, damaged or in torch's format before 1.6
            (exit code 5), or it holds an object that is not loaded; names the file.
    """

    def __init__(
        self, path: Path, records: Collection[str] = (), span: tuple[int, int] | None = None
    ) -> None:
        self.path = path
        self._storages: dict[str, Storage] = {}
        try:
            self._start, length = span or (0, path.stat().st_size)
            self._end = self._start + length
            with (
                open_file(path) as file,
                zipfile.ZipFile(_Span(file, self._start, length)) as archive,
            ):
                self._entries = {
                    entry.filename.partition("/")[2]: entry for entry in archive.infolist()
                }
                if "data.pkl" not in self._entries:
                    raise damaged(path, "it is no file of torch.save")
                if self._bytes_of(archive, "byteorder") not in (b"", b"little"):
                    raise damaged(path, "its numbers are big-endian")
                pickled = self._bytes_of(archive, "data.pkl")
        except FileNotFoundError:
            raise damaged(path, "it is missing") from None
        except OSError as error:
            raise damaged(path, f"it cannot be read ({error.strerror})") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            why = f"it is truncated, damaged, or not in torch's zip format ({error})"
            raise damaged(path, why) from None
        self.content = unpickle(pickled, path, records=records, storage=self._storage)

    def verify(self) -> None:
        """Compare the checksums of all tensors that were read.

        Raises:
            TrainctlError: One differs.
        """
        for storage in self._storages.values():
            storage.verify()

    def _bytes_of(self, archive: zipfile.ZipFile, name: str) -> bytes:
        entry = self._entries.get(name)
        if entry is None:
            return b""
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > MOST_PICKLE_BYTES:
            raise damaged(
                self.path, f"{name} in it is compressed, or has {entry.file_size:,} bytes"
            )
        return archive.read(entry)

    def _storage(self, key: str) -> Storage:
        if key not in self._storages:
            entry = self._entries.get(f"data/{key}")
            if entry is None:
                raise damaged(self.path, f"tensor {key} is missing in it")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise damaged(self.path, "it is compressed, which torch.save does not do")
            offset = self._data_offset(entry)
            if offset + entry.file_size > self._end:
                raise damaged(self.path, "it is truncated")
            self._storages[key] = Storage(self.path, offset, entry.file_size, entry.CRC)
        return self._storages[key]

    def _data_offset(self, entry: zipfile.ZipInfo) -> int:
        """Return where an entry's bytes begin: after its local header, name and extra field."""
        start = self._start + entry.header_offset
        with open_file(self.path) as file:
            file.seek(start)
            header = file.read(30)
        if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
            raise damaged(self.path, "it is damaged (a zip header is not there)")
        name, extra = struct.unpack("<HH", header[26:30])
        return start + 30 + int(name) + int(extra)


def unpickle(
    data: bytes,
    path: Path,
    *,
    records: Collection[str] = (),
    storage: Callable[[str], Storage] | None = None,
) -> Any:
    """Return the plain values in a pickle.

    Args:
        path: File to name in errors.
        records: Dotted names of classes whose objects become `Record`s, beside `RECORDS`.
        storage: Returns the storage of a key; None refuses tensors.

    Raises:
        TrainctlError: The pickle is damaged (exit code 5), or it holds an object that is not loaded
            (exit code 2).
    """
    try:
        return _Unpickler(data, path, {*RECORDS, *records}, storage).load()
    except TrainctlError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        what = str(error) or type(error).__name__
        raise damaged(path, f"its pickle is damaged ({what})") from None


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        path: Path,
        records: Collection[str],
        storage: Callable[[str], Storage] | None,
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._path, self._records, self._storage = path, records, storage

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")  # before protocol 3
        if full in _PLAIN:
            return _PLAIN[full]
        if full in self._records:
            return type(name, (Record,), {"kind": full})
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise TrainctlError(
            f"{self._path} holds an object of {full}, and objects of other programs are not loaded",
            hint="save it without that object: only tensors and plain values are read",
        )

    def persistent_load(self, pid: Any) -> tuple[Storage, torch.dtype]:
        if self._storage is None or not isinstance(pid, tuple) or pid[0] != "storage":
            raise pickle.UnpicklingError("a reference to nothing")
        _, kind, key, *_ = pid
        return self._storage(str(key)), kind


def _tensor(
    stored: tuple[Storage, torch.dtype],
    start: int,
    shape: Sequence[int],
    stride: Sequence[int],
    *rest: Any,
    dtype: torch.dtype | None = None,
) -> LazyTensor:
    storage, kind = stored
    tensor = LazyTensor(storage, dtype or kind, tuple(shape), int(start), tuple(stride))
    steps = zip(tensor.shape, tensor.stride, strict=True)
    last = tensor.start + sum((size - 1) * step for size, step in steps)
    is_inside = not tensor.numel or (last + 1) * tensor.dtype.itemsize <= storage.num_bytes
    if min((tensor.start, *tensor.shape, *tensor.stride)) < 0 or not is_inside:
        raise pickle.UnpicklingError("a tensor is larger than its storage")
    if tensor.numel and not _has_distinct_elements(tensor):
        raise pickle.UnpicklingError("a tensor has the same element several times")
    return tensor


def _has_distinct_elements(tensor: LazyTensor) -> bool:
    """Return True if no two indices mean the same element, as they do in an expanded tensor."""
    span = 1
    for stride, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span = max(span, stride * size)
    return True


def _untyped_tensor(
    stored: tuple[Storage, torch.dtype],
    start: int,
    shape: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    *rest: Any,
) -> LazyTensor:
    """Return the tensor of `_rebuild_tensor_v3`, which has an untyped storage."""
    return _tensor(stored, start, shape, stride, dtype=dtype)


def _parameter(data: LazyTensor, *rest: Any) -> LazyTensor:
    return data


def _with_type(function: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """Return the tensor of `_rebuild_from_type_v2`, without its subclass and attributes."""
    return function(*args)


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes, which pickles before protocol 3 hold as text."""
    return text.encode("latin1")


def _copied_bytes(data: bytes = b"", *rest: Any) -> bytes:
    """Return the bytes of a `bytearray`, which a number would make as large as it says."""
    return bytes(data) if isinstance(data, bytes) else b""


class _Dictionary(dict[Any, Any]):
    """An `OrderedDict`, without the attributes that a module's `state_dict` has (`_metadata`)."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the attributes."""


def _no_default(factory: Any = None) -> dict[Any, Any]:
    """Return a `defaultdict` as a plain dictionary."""
    return {}


def _path(*parts: object) -> str:
    return "/".join(map(_text, parts))


def _text(value: object = "", *rest: Any) -> str:
    """Return a plain value as text: of nested lists it would have no bounds."""
    if not isinstance(value, str | int | float | bytes):
        raise pickle.UnpicklingError("a text of something else")
    return str(value)


_PLAIN: Mapping[str, Any] = {
    "collections.OrderedDict": _Dictionary,
    "collections.defaultdict": _no_default,
    "torch.Size": tuple,
    "torch.device": _path,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _untyped_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_type,
    "torch.nn.parameter.Parameter": _parameter,
    "torch._tensor.Tensor": _parameter,
    "torch.Tensor": _parameter,
    "_codecs.encode": _encoded,
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,
    **{f"builtins.{kind.__name__}": kind for kind in (set, frozenset, dict, list, tuple)},
    **{f"builtins.{kind.__name__}": kind for kind in (int, float, bool, complex)},
    "builtins.str": _text,
    "builtins.bytearray": _copied_bytes,
}
"""Functions that a pickle may call: each makes a plain value or a `LazyTensor`."""

_STORAGES: Mapping[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}

RECORDS = frozenset(
    {
        "argparse.Namespace",
        "types.SimpleNamespace",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "deepspeed.checkpoint.utils.SubparamShape",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
"""Classes (and numpy's constructors) whose objects trainers save beside tensors."""
