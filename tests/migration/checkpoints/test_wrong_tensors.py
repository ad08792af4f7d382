"""A checkpoint whose tensors are not whole, finite floating-point numbers is not imported."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import deepspeed_files
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_files import values_of
from rank_processes import tiny_config, tiny_plan
from safetensors.torch import save_file

from trainctl.errors import ExitCode, TrainctlError
from trainctl.migration.checkpoints import write
from trainctl.migration.checkpoints.dcp import _make_up
from trainctl.migration.checkpoints.source import open_source
from trainctl.plans.shapes import all_tensors
from trainctl.plans.types import RunPlan
from trainctl.train.models.model import skeleton

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return tiny_plan(tiny_config(steps=20, model__num_layers=1), 1)


@pytest.fixture(scope="module")
def shapes(plan: RunPlan) -> list[dict[str, list[int]]]:
    return [{tensor.name: list(tensor.shape) for tensor in all_tensors(plan.config.model)}]


@pytest.fixture(scope="module")
def model(plan: RunPlan) -> Any:
    return skeleton(plan.config.model, torch.float32)


def take(folder: Path, model: Any) -> None:
    """Read a checkpoint as an import does, without writing a run."""
    source = open_source(folder)
    source.use_model(model)
    write._check_facts(source)
    for name, shape in source.shapes.items():
        for state in source.states:
            write._read_piece(source, name, state, 0, prod(shape))
    source.verify()


def assert_refused(folder: Path, model: Any, why: str) -> None:
    with pytest.raises(TrainctlError, match=why) as caught:
        take(folder, model)
    assert caught.value.exit_code == ExitCode.run_state


def edit(file: Path, change: Any) -> None:
    content = torch.load(file, weights_only=False)
    change(content["optimizer_state_dict"])
    torch.save(content, file)


def _state_of(optimizer: dict[str, Any]) -> dict[str, Any]:
    inner = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    return inner["state"][0]


def _flat(optimizer: dict[str, Any]) -> list[torch.Tensor]:
    return optimizer.get("single_partition_of_fp32_groups") or optimizer["fp32_flat_groups"]


FAULTS = {
    "moment is short": lambda o: _state_of(o).update(exp_avg=_state_of(o)["exp_avg"][:-3].clone()),
    "moment is long": lambda o: _state_of(o).update(exp_avg=torch.ones(10**5)),
    "weights are long": lambda o: _flat(o).__setitem__(0, torch.ones(_flat(o)[0].numel() + 2)),
    "whole numbers": lambda o: _state_of(o).update(exp_avg_sq=_state_of(o)["exp_avg_sq"].long()),
    "expanded": lambda o: _state_of(o).update(exp_avg=torch.ones(1).expand(10**16)),
    "NaN": lambda o: _state_of(o)["exp_avg"].__setitem__(5, float("nan")),
    "infinite": lambda o: _flat(o)[0].__setitem__(5, float("inf")),
    "another group": lambda o: _flat(o).append(torch.ones(4)),
    "no count": lambda o: _state_of(o).update(step=float("nan")),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_partitions_are_whole(tmp_path, model, shapes, stage, fault):
    place = deepspeed_files.save(tmp_path / "source", shapes, stage=stage, ranks=2)
    for file in sorted(place.glob("*optim_states.pt")):
        edit(file, FAULTS[fault])
        if fault in ("weights are long", "moment is short"):
            break
    assert_refused(tmp_path / "source", model, str(tmp_path / "source"))


def test_swapped_files_of_ranks_are_found_by_the_weights(tmp_path, model, shapes):
    """Files of ZeRO 1 and 2 do not say their rank; the weights in the model's file do."""
    module = {name: values_of(name, shape, "fp32").bfloat16() for name, shape in shapes[0].items()}
    sizes = {"stage": 1, "ranks": 3, "module": module}
    place = deepspeed_files.save(tmp_path / "source", shapes, **sizes)
    take(tmp_path / "source", model)
    first, second = sorted(place.glob("*optim_states.pt"))[:2]
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    assert_refused(tmp_path / "source", model, "or were swapped")


def test_what_cannot_be_checked_is_told(tmp_path, plan, shapes):
    deepspeed_files.save(tmp_path / "source", shapes, stage=3, ranks=2)
    made = write.import_source(open_source(tmp_path / "source"), plan, tmp_path / "run")
    assert ["swapped" in each for each in made.unchecked] == [True]


def universal(folder: Path, shapes: list[dict[str, list[int]]], change: Any = None) -> Path:
    for name, shape in shapes[0].items():
        (folder / "zero" / name).mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            value = values_of(name, shape, state)
            if change is not None and name == NORM and state == "exp_avg":
                value = change(value)
            torch.save({"param": value}, folder / "zero" / name / f"{state}.pt")
        torch.save(3, folder / "zero" / name / "step.pt")
    return folder


CHANGES = {
    "short": lambda v: v[:-1].clone(),
    "whole numbers": lambda v: (v * 10).long(),
    "truth values": lambda v: v > 0.5,
    "expanded": lambda v: v[:1].expand(v.shape),
    "NaN": lambda v: v * float("nan"),
    "too large for fp32": lambda v: v.double() * 1e300,
}


def test_nothing_is_left_of_an_import_of_wrong_values(tmp_path, plan, shapes):
    source = open_source(universal(tmp_path / "source", shapes, CHANGES["NaN"]))
    with pytest.raises(TrainctlError, match="no numbers"):
        write.import_source(source, plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", CHANGES)
def test_universal_states_are_whole(tmp_path, model, shapes, change):
    universal(tmp_path / "source", shapes, CHANGES[change])
    assert_refused(tmp_path / "source", model, "source")


def test_a_whole_universal_checkpoint_is_imported(tmp_path, plan, shapes):
    made = write.import_source(
        open_source(universal(tmp_path / "s", shapes)), plan, tmp_path / "run"
    )
    assert (made.step, made.unchecked) == (3, [])


@pytest.mark.parametrize(
    ("boxes", "is_whole"),
    [
        ([((0, 0), (4, 3)), ((0, 3), (4, 3))], True),
        ([((0, 0), (4, 4)), ((0, 2), (2, 4))], False),
        ([((0, 0), (4, 3)), ((0, 0), (4, 3))], False),
        ([((0, 0), (2, 6)), ((2, 0), (2, 6))], True),
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], False),
        ([((0, 0), (4, 7)), ((3, 0), (-4, 1))], False),
        ([((0, 0), (8, 3))], False),
        ([((0,), (24,))], False),
        ([], False),
    ],
)
def test_chunks_have_each_element_once(boxes, is_whole):
    assert _make_up((4, 6), boxes) is is_whole


def distributed(folder: Path, shapes: list[dict[str, list[int]]], **changed: Any) -> Path:
    weights = {name: values_of(name, shape, "fp32") for name, shape in shapes[0].items()}
    folder.mkdir()
    dcp.save({"model": weights | changed, "step": 3}, checkpoint_id=str(folder), no_dist=True)
    return folder


def test_overlapping_chunks_of_a_distributed_checkpoint_are_refused(tmp_path, model, shapes):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    folder = distributed(tmp_path / "source", shapes)
    metadata = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    key = f"model.{NORM}"
    half = shapes[0][NORM][0] // 2
    (index,) = [each for each in metadata.storage_data if each.fqn == key]
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([half])) for _ in range(2)]
    metadata.state_dict_metadata[key].chunks = chunks
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert index.offset is not None
    assert_refused(folder, model, "do not make it up")


@pytest.mark.parametrize("kind", ["whole numbers", "NaN"])
def test_chunks_are_finite_numbers(tmp_path, model, shapes, kind):
    value = CHANGES[kind](values_of(NORM, shapes[0][NORM], "fp32"))
    folder = distributed(tmp_path / "source", shapes, **{NORM: value})
    assert_refused(folder, model, "source")


def trainer(folder: Path, shapes: list[dict[str, list[int]]], **state: Any) -> Path:
    folder.mkdir()
    weights = {name: values_of(name, shape, "fp32") for name, shape in shapes[0].items()}
    save_file(weights, folder / "model.safetensors")
    states = {
        number: {"step": torch.tensor(3.0), "exp_avg": value, "exp_avg_sq": value.square()}
        for number, value in enumerate(weights.values())
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "params": list(states)}]
    torch.save({"state": states, "param_groups": groups}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, **state}))
    return folder


def test_a_trainers_weights_are_finite_and_have_no_checksum(tmp_path, model, shapes):
    folder = trainer(tmp_path / "source", shapes)
    source = open_source(folder)
    source.use_model(model)
    assert any("safetensors have no checksum" in each for each in source.unchecked)
    take(folder, model)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = b"\xff\xff\xff\x7f"  # a NaN
    file.write_bytes(content)
    assert_refused(folder, model, "no numbers")


@pytest.mark.parametrize(
    "state",
    [
        {"global_step": 10**30},
        {"global_step": -1},
        {"num_input_tokens_seen": 10**30},
    ],
)
def test_impossible_counters_are_refused(tmp_path, model, shapes, state):
    folder = trainer(tmp_path / "source", shapes, **state)
    assert_refused(folder, model, "source")


def sparse(file: Path) -> None:
    file.unlink(missing_ok=True)
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


@pytest.mark.parametrize("content", ["terabyte", "binary", "away", "empty"])
@pytest.mark.parametrize("file", ["latest", "latest_universal", "trainer_state.json", ".metadata"])
def test_files_beside_the_tensors_have_limits(tmp_path, model, shapes, file, content):
    folder = tmp_path / "source"
    if file == "latest":
        deepspeed_files.save(folder, shapes, stage=1, ranks=1)
    elif file == "latest_universal":
        universal(folder, shapes)
    elif file == "trainer_state.json":
        trainer(folder, shapes)
    else:
        distributed(folder, shapes)
    if content == "terabyte":
        sparse(folder / file)
    else:
        known = {"binary": b"\xff\xfe\x00", "away": b"../../elsewhere", "empty": b""}
        (folder / file).write_bytes(known[content])
    assert_refused(folder, model, file.replace(".", r"\."))


@pytest.mark.parametrize("kind", ["deepspeed", "universal", "trainer", "sharded"])
def test_a_pipe_is_not_waited_for(tmp_path, model, shapes, kind):
    folder = tmp_path / "source"
    if kind == "deepspeed":
        file = deepspeed_files.save(folder, shapes, stage=1, ranks=1) / (
            "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        )
    elif kind == "universal":
        file = universal(folder, shapes) / "zero" / NORM / "fp32.pt"
    else:
        file = trainer(folder, shapes) / "model.safetensors"
        if kind == "sharded":
            index = {"weight_map": dict.fromkeys(shapes[0], file.name)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()
    os.mkfifo(file)
    assert_refused(folder, model, str(folder))


def test_a_compressed_pickle_is_not_inflated(tmp_path):
    file = tmp_path / "optimizer.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (64 << 20))
    assert file.stat().st_size < 1 << 20
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(TrainctlError, match="compressed"):
        open_source(tmp_path)
