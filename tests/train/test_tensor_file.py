"""Test that the safetensors library reads the files that trainctl writes."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file
from tensor_files import write_tensors


def test_the_library_reads_it_back(tmp_path):
    flat = torch.arange(1000.0)
    tensors = {
        "master/0": flat,
        "part": flat[100:200],
        "half": torch.randn(7).bfloat16(),
        "matrix": torch.randn(3, 5),
        "empty": torch.empty(0),
    }
    path = tmp_path / "x.safetensors"
    size, digest = write_tensors(path, tensors)
    assert size == path.stat().st_size
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


def test_an_existing_file_is_not_overwritten(tmp_path):
    write_tensors(tmp_path / "x", {})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {})
