"""Every element of a DeepSpeed checkpoint is found, and a directory with a fault is refused."""

import math
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed_files import STATES, save, values_of

from trainctl.errors import ExitCode, TrainctlError
from trainctl.migration.checkpoints.source import Source, detect, open_source

SHAPES = (
    {"model.embed.weight": [11, 6], "model.0.weight": [7, 3], "model.0.tiny": [1]},
    {"model.0.norm": [5], "model.1.norm": [13]},
)


def assert_all_read(source: Source) -> None:
    for name, shape in {name: shape for group in SHAPES for name, shape in group.items()}.items():
        assert source.shapes[name] == tuple(shape)
        for state in ("master", *STATES):
            whole = values_of(name, shape, "fp32" if state == "master" else state).view(-1)
            start = random.Random(name).randrange(whole.numel())
            for first, last in ((0, whole.numel()), (start, whole.numel()), (0, start)):
                assert torch.equal(source.read(name, state, first, last), whole[first:last])
    source.verify()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("stage", "is_elastic", "prefix"), [(1, False, ""), (2, True, "bf16_"), (3, False, "")]
)
def test_all_elements_are_found_on_any_number_of_ranks(
    tmp_path: Path, stage: int, ranks: int, is_elastic: bool, prefix: str
) -> None:
    frozen = {"model.frozen": torch.rand(3, 5), "model.scalar": torch.rand(1)}
    save(
        tmp_path,
        SHAPES,
        stage=stage,
        ranks=ranks,
        is_elastic=is_elastic,
        prefix=prefix,
        frozen=frozen,
    )
    source = open_source(tmp_path)
    assert (source.format, source.states) == ("deepspeed", ("master", *STATES))
    assert source.scalars == {"step": 7.0} and source.progress.samples == 56
    assert source.untrained == set(frozen)
    for name, tensor in frozen.items():
        assert torch.equal(source.read(name, "master", 0, tensor.numel()), tensor.view(-1))
    assert_all_read(source)


def test_alignment_within_a_group_is_skipped(tmp_path: Path) -> None:
    """DeepSpeed says how many zeros follow each parameter (`param_alignment_paddings`)."""
    shapes = ({"a": [3], "gap": [2], "b": [4]},)
    paddings = [[2, 1]]
    place = save(
        tmp_path,
        shapes,
        stage=1,
        ranks=2,
        optimizer={"param_alignment_paddings": paddings},
        param_shapes=[{"a": torch.Size([3]), "b": torch.Size([3])}],
    )
    assert detect(place) == "deepspeed"
    source = open_source(place)
    assert torch.equal(source.read("b", "master", 0, 3), values_of("b", [4], "fp32")[:3])


def test_loss_scale_hyperparameters_and_skipped_steps_are_read(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=2**12,
        scale_window=100,
        min_scale=1,
        delayed_shift=2,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
    scaler.cur_iter, scaler.last_overflow_iter = 7, 3
    state = {"loss_scaler": scaler, "dynamic_loss_scale": True}
    save(tmp_path, SHAPES, stage=1, ranks=2, prefix="fp16_", optimizer=state, skipped_steps=2)
    source = open_source(tmp_path)
    assert source.loss_scale == {
        "cur_scale": 4096.0,
        "cur_iter": 7.0,
        "last_overflow_iter": 3.0,
        "cur_hysteresis": 2.0,
    }
    hyperparameters = {"lr": 1e-3, "epsilon": 1e-8, "beta1": 0.9, "beta2": 0.95}
    assert source.hyperparameters == {**hyperparameters, "weight_decay": 0.1}
    assert any("skipped" in note for note in source.notes)


@pytest.mark.parametrize("groups", [1, 2])
def test_without_zero_the_shapes_tell_which_states_are_whose(tmp_path: Path, groups: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4))
    matrices, vectors = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    grouped = [{"params": matrices}, {"params": vectors}]
    optimizer = torch.optim.AdamW(model.parameters() if groups == 1 else grouped)
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    file = tmp_path / "mp_rank_00_model_states.pt"
    saved = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 1}
    torch.save({**saved, "ds_version": "0.19.8"}, file)
    source = open_source(tmp_path)
    for name, parameter in model.named_parameters():
        held = {"master": parameter, **optimizer.state[parameter]}
        for state in ("master", *STATES):
            assert torch.equal(
                source.read(name, state, 0, parameter.numel()), held[state].detach().view(-1)
            )


@pytest.mark.parametrize("is_fused", [True, False])
def test_masters_of_the_fp16_optimizer_are_taken_not_the_rounded_weights(
    tmp_path: Path, is_fused: bool
) -> None:
    """runtime/fp16/fused_optimizer.py has flat groups, unfused_optimizer.py a tensor for each."""
    masters = {"a": torch.rand(3, 5), "b": torch.rand(7)}
    flat = torch.cat([each.view(-1) for each in masters.values()])
    tensors = [flat] if is_fused else list(masters.values())
    states = {
        index: {"step": 4, "exp_avg": tensor * 2, "exp_avg_sq": tensor * 3}
        for index, tensor in enumerate(tensors)
    }
    group = {"lr": 1e-3, "params": list(states)}
    optimizer = {
        "optimizer_state_dict": {"state": states, "param_groups": [group]},
        "dynamic_loss_scale": True,
        "cur_scale": 1024.0,
        "cur_iter": 4,
        "last_overflow_iter": -1,
        **({"fp32_groups_flat": tensors} if is_fused else {"fp32_groups": [tensors]}),
    }
    module = {name: tensor.half() for name, tensor in masters.items()}
    saved = {"module": module, "optimizer": optimizer, "ds_version": "0.19.8", "global_steps": 4}
    torch.save(saved, tmp_path / "mp_rank_00_model_states.pt")
    source = open_source(tmp_path)
    for name, tensor in masters.items():
        for state, factor in (("master", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
            values = source.read(name, state, 0, tensor.numel())
            assert torch.equal(values, tensor.view(-1) * factor)
    assert source.scalars == {"step": 4.0} and source.loss_scale["cur_scale"] == 1024.0


def test_states_that_could_be_of_several_parameters_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    first, *_, second, last = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [second, last]}, {"params": [first]}])
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    saved = {"module": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**saved, "ds_version": "0.19.8"}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(TrainctlError, match="does not follow"):
        open_source(tmp_path)


def damage(place: Path, fault: str) -> str:
    """Make a fault in a checkpoint of 4 ranks; return the name of the file at fault."""
    names = sorted(path.name for path in place.iterdir())
    optimizers = [name for name in names if "optim" in name]
    name = optimizers[2]
    match fault:
        case "missing":
            (place / name).unlink()
        case "last missing":
            name = optimizers[-1]
            (place / name).unlink()
        case "all missing":
            for each in optimizers:
                (place / each).unlink()
            name = "*_optim_states.pt"
        case "no model":
            name = next(name for name in names if "model" in name and "rank_00" in name)
            (place / name).unlink()
        case "truncated":
            whole = (place / name).read_bytes()
            (place / name).write_bytes(whole[: len(whole) // 2])
        case "one more":
            shutil.copy(
                place / optimizers[0], place / optimizers[0].replace("pp_rank_0", "pp_rank_4")
            )
            name = optimizers[0].replace("pp_rank_0", "pp_rank_4")
        case "pickle":
            content = bytearray((place / name).read_bytes())
            content[content.index(b"partition_count")] ^= 4
            (place / name).write_bytes(bytes(content))
        case "another step" | "no moment":
            content = torch.load(place / name, weights_only=False)
            state = content["optimizer_state_dict"]
            inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
            if fault == "another step":
                inner["state"][0]["step"] = torch.tensor(6.0)
            else:
                del inner["state"][1]["exp_avg_sq"]
            torch.save(content, place / name)
        case "shorter":
            content = torch.load(place / name, weights_only=False)
            state = content["optimizer_state_dict"]
            flats = state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]
            flats[0] = flats[0][:-3].clone()
            torch.save(content, place / name)
    return name


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "fault",
    [
        "missing",
        "last missing",
        "all missing",
        "truncated",
        "one more",
        "pickle",
        "shorter",
        "another step",
        "no moment",
    ],
)
def test_a_directory_with_a_fault_is_refused_and_names_the_file(
    tmp_path: Path, stage: int, fault: str
) -> None:
    place = save(tmp_path, SHAPES, stage=stage, ranks=4)
    name = damage(place, fault)
    with pytest.raises(TrainctlError, match=re.escape(name)) as error:
        assert_all_read(open_source(tmp_path))
    assert error.value.exit_code is ExitCode.run_state


def test_a_model_file_of_a_rank_is_missed_at_zero_3(tmp_path: Path) -> None:
    place = save(tmp_path, SHAPES, stage=3, ranks=2)
    (place / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(TrainctlError, match="zero_pp_rank_1_mp_rank_00_model"):
        open_source(tmp_path)


def test_a_changed_byte_of_a_tensor_is_found_before_anything_is_committed(tmp_path: Path) -> None:
    place = save(tmp_path, SHAPES, stage=3, ranks=2)
    file = place / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(file.read_bytes())
    values = torch.load(file, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][0]
    content[content.index(values.numpy().tobytes()) + 5] ^= 1
    file.write_bytes(bytes(content))
    source = open_source(tmp_path)
    for name in source.shapes:
        numel = math.prod(source.shapes[name])
        source.read(name, "master", numel - 1, numel)
    with pytest.raises(TrainctlError, match=file.name):
        source.verify()


def test_states_on_nvme_and_unknown_content_are_refused(tmp_path: Path) -> None:
    place = save(tmp_path / "a", SHAPES, stage=3, ranks=2)
    (place / "offloaded_tensors").mkdir()
    with pytest.raises(TrainctlError, match="NVMe"):
        open_source(tmp_path / "a")
    save(tmp_path / "b", SHAPES, stage=1, ranks=1, optimizer={"base_optimizer_state": {"x": 1}})
    with pytest.raises(TrainctlError, match=r"no DeepSpeed checkpoint.* that can be read"):
        open_source(tmp_path / "b")
    with pytest.raises(TrainctlError, match="--from deepsped is none of") as error:
        open_source(tmp_path / "a", "deepsped")
    assert "deepspeed" in error.value.hint


def test_a_pointer_to_nothing_and_no_checkpoint_are_said(tmp_path: Path) -> None:
    with pytest.raises(TrainctlError, match="no checkpoint is recognised"):
        detect(tmp_path)
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(TrainctlError, match="global_step9"):
        detect(tmp_path)
    with pytest.raises(TrainctlError, match="is no directory"):
        open_source(tmp_path / "nothing")
