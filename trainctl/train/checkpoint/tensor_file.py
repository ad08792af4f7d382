"""Single-pass safetensors writer: tensor by tensor, with a checksum of the written bytes.

safetensors' own writer first copies every tensor in host memory, and gives no checksum. Reading
uses the library.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch

_TYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write tensors to a new safetensors file and sync it; see `write_stream`."""
    layout = {name: (item.dtype, item.shape) for name, item in tensors.items()}
    return write_stream(path, layout, tensors.values())


def write_stream(
    path: Path,
    layout: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Write tensors to a new safetensors file as they come, and sync it.

    Args:
        path: The file, which must not exist.
        tensors: The tensors in the order of `layout`, whole or in pieces; each is written before
            the next is taken.

    Returns:
        Size in bytes and SHA-256 of the file.

    Raises:
        OSError: The file cannot be written.
    """
    digest = hashlib.sha256()
    header = memoryview(encode_header(layout, metadata))
    with path.open("xb") as file:
        for raw in chain((header,), map(raw_bytes, tensors)):
            file.write(raw)
            digest.update(raw)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the bytes of a safetensors file up to the first tensor."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _TYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's elements as the bytes of a safetensors file."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
