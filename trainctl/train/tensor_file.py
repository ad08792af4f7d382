"""Writing safetensors in one pass: tensor by tensor, with the checksum of what is written.

The library's own writer first makes a second copy of every tensor in host memory, and gives no
checksum. Reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

_TYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write contiguous tensors to a new safetensors file and sync it.

    Returns:
        Size in bytes and SHA-256 of the file.

    Raises:
        OSError: The file cannot be written.
    """
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in (len(encoded).to_bytes(8, "little"), encoded):
            file.write(part)
            digest.update(part)
        for tensor in tensors.values():
            raw = memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            file.write(raw)
            digest.update(raw)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()
