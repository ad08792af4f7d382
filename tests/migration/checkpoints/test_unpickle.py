"""Pickles of others are read without running what is in them, and tensors by ranges."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from trainctl.errors import ExitCode, TrainctlError
from trainctl.migration.checkpoints.unpickle import LazyTensor, TorchFile, unpickle
from trainctl.migration.configs.pickled import Record


def saved(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "content.pt"
    torch.save(content, path)
    return path


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_ranges_of_tensors_are_those_of_torch(tmp_path: Path, kind: torch.dtype) -> None:
    whole = (torch.rand(40, 6) * 100).to(kind)
    parts = {"whole": whole, "view": whole[3:9], "turned": whole.t(), "one": whole[0, 0]}
    found = TorchFile(saved(tmp_path, parts))
    for name, tensor in parts.items():
        held = found.content[name]
        assert isinstance(held, LazyTensor) and held.shape == tuple(tensor.shape)
        for start, end in ((0, tensor.numel()), (5, 17)):
            first, last = min(start, tensor.numel()), min(end, tensor.numel())
            assert torch.equal(held.read(first, last), tensor.reshape(-1)[first:last])
    found.verify()


def test_plain_values_stay_as_they_are(tmp_path: Path) -> None:
    plain = {"a": [1, 2.5, None, True], "b": ("x", {"y"}), 3: b"bytes", "size": torch.Size([2, 3])}
    found = TorchFile(saved(tmp_path, {**plain, "state": torch.nn.Linear(2, 2).state_dict()}))
    assert {name: found.content[name] for name in plain} == plain
    assert list(found.content["state"]) == ["weight", "bias"]


class Commands:
    """Object whose unpickling runs a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("exit 3",)


@pytest.mark.parametrize("content", [Commands(), {"deep": [Commands()]}, io.StringIO, print])
def test_any_other_object_is_refused_by_its_name(tmp_path: Path, content: object) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(TrainctlError, match=r"system|StringIO|print") as error:
        TorchFile(path)
    assert str(path) in error.value.message


class Zeros:
    """Object whose unpickling asks for as much memory as a number says."""

    def __reduce__(self) -> tuple[object, ...]:
        return bytearray, (1 << 50,)


def test_a_number_makes_no_bytes() -> None:
    assert unpickle(pickle.dumps([Zeros(), bytearray(b"ab")], protocol=4), Path("x")) == [
        b"",
        b"ab",
    ]


def test_named_classes_become_records_without_behaviour() -> None:
    import argparse

    data = pickle.dumps(argparse.Namespace(lr=0.1, layers=4))
    found = unpickle(data, Path("args"))
    assert isinstance(found, Record) and found.fields == {"lr": 0.1, "layers": 4}


def test_a_file_that_ends_early_or_has_another_byte_is_damaged(tmp_path: Path) -> None:
    path = saved(tmp_path, {"weight": torch.rand(5000), "step": 3})
    whole = path.read_bytes()
    values = whole.index(torch.load(path)["weight"].numpy().tobytes())
    pickled = whole.index(b"_rebuild_tensor_v2")
    for content in (whole[:-1], whole[: len(whole) // 2], whole[:10], b"", changed(whole, pickled)):
        path.write_bytes(content)
        with pytest.raises(TrainctlError, match=r"content\.pt") as error:
            TorchFile(path)
        assert error.value.exit_code is ExitCode.run_state
    path.write_bytes(changed(whole, values + 4000))
    file = TorchFile(path)
    file.content["weight"].read(0, 10)  # the rest is read to compare the checksum
    with pytest.raises(TrainctlError, match="checksum"):
        file.verify()


def changed(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_torchs_older_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"weight": torch.rand(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(TrainctlError, match="zip format"):
        TorchFile(path)


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.rand(4))
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            larger = data.replace(b"K\x04\x85", b"K\x40\x85") if name.endswith(".pkl") else data
            assert larger != data or not name.endswith(".pkl")
            archive.writestr(name, larger)
    with pytest.raises(TrainctlError, match="larger than its storage"):
        TorchFile(path)
