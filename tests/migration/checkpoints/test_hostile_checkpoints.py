"""A changed checkpoint is refused, or its tensors are the ones that were saved."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import deepspeed_files
import pytest
import torch
from deepspeed_files import STATES, values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints import write
from trainctl.migration.checkpoints.source import FORMATS, open_source

SHAPES = ({"a.weight": [5, 3], "a.bias": [4]}, {"norm": [7]})
NAMES = {name: shape for group in SHAPES for name, shape in group.items()}

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**30, math.nan, math.inf, 1e300, "", "..", "a\0b", b"x", [], {}, [None],
    {"a": None}, torch.ones(2), torch.tensor(3), torch.tensor(math.nan),
)  # fmt: skip
"""Values that take the place of others."""

CHANGES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda tensor: tensor[:-1].clone(),
    lambda tensor: tensor[:0].clone(),
    lambda tensor: torch.cat([tensor.reshape(-1)] * 2),
    lambda tensor: tensor.long(),
    lambda tensor: tensor > 0,
    lambda tensor: tensor * math.nan,
    lambda tensor: tensor.double() * 1e300,
    lambda tensor: tensor.reshape(-1)[:1].expand(10**16),
    lambda tensor: tensor.reshape(-1)[:1].expand(tensor.numel()),
    lambda tensor: tensor.reshape(-1)[::2].clone(),
    lambda tensor: tensor.reshape(1, -1),
    lambda tensor: tensor.reshape(-1).as_strided((tensor.numel(), 1), (1, 1)),
)
"""Changes of a tensor's shape, type or values; none makes other finite values in its place."""


def universal(folder: Path) -> Path:
    for name, shape in NAMES.items():
        (folder / "zero" / name).mkdir(parents=True)
        for state in ("fp32", *STATES):
            torch.save(
                {"param": values_of(name, shape, state)}, folder / "zero" / name / f"{state}.pt"
            )
        torch.save(7, folder / "zero" / name / "step.pt")
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "ZeRO 1": lambda folder: deepspeed_files.save(folder, SHAPES, stage=1, ranks=2),
    "ZeRO 3": lambda folder: deepspeed_files.save(folder, SHAPES, stage=3, ranks=2),
    "universal": universal,
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: save(tmp_path_factory.mktemp(kind.replace(" ", ""))) for kind, save in KINDS.items()
    }


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested mappings and lists."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _change(data: st.DataObject, content: Any) -> Any:
    """Return the content with a value removed, replaced or, if it is a tensor, changed."""
    content = deepcopy(content)
    places = list(_places(content))
    if not places:
        return data.draw(st.sampled_from(VALUES))
    *parents, last = data.draw(st.sampled_from(places))
    owner = content
    for key in parents:
        owner = owner[key]
    old = owner[last]
    if isinstance(old, torch.Tensor) and old.numel() > 1 and data.draw(st.booleans()):
        owner[last] = data.draw(st.sampled_from(CHANGES))(old)
    elif data.draw(st.booleans()):
        owner[last] = data.draw(st.sampled_from(VALUES))
    else:
        del owner[last]
    return content


def _damage(data: st.DataObject, file: Path) -> None:
    content = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(["value", "value", "value", "byte", "cut", "gone"])):
        case "value":
            torch.save(_change(data, torch.load(file, weights_only=False)), file)
        case "byte":
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        case "gone":
            file.unlink()


def _check(data: st.DataObject, original: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / original.name
        shutil.copytree(original, place)
        files = sorted(path for path in place.rglob("*.pt"))
        _damage(data, data.draw(st.sampled_from(files)))
        try:
            source = open_source(place)
            write._check_facts(source)
            assert source.format in FORMATS
            if source.shapes != {name: tuple(shape) for name, shape in NAMES.items()}:
                return  # refused by the model's shapes
            read = {
                (name, state): write._read_piece(source, name, state, 0, math.prod(shape))
                for name, shape in NAMES.items()
                for state in source.states
            }
            source.verify()
        except TrainctlError:
            return
        for (name, state), values in read.items():
            there = values_of(name, NAMES[name], "fp32" if state == "master" else state)
            assert torch.equal(values, there.view(-1)), (name, state)


CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large)


@pytest.mark.parametrize("kind", KINDS)
def test_no_wrong_tensor_is_taken(originals, kind):
    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=CHECKS)
    @given(st.data())
    def check(data):
        _check(data, originals[kind])

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_wrong_tensor_is_taken_of_many(originals, kind):
    @settings(max_examples=2000, deadline=None, database=None, suppress_health_check=CHECKS)
    @given(st.data())
    def check(data):
        _check(data, originals[kind])

    check()
