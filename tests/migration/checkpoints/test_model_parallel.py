"""Stages and slices of model-parallel ranks make up whole parameters, or are refused by name."""

from pathlib import Path

import pytest
import torch
from deepspeed_files import save, values_of

from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints.model_parallel import pipeline_names
from trainctl.migration.checkpoints.source import open_source

BLOCK = {"attention.weight": (4, 4), "norm.weight": (4,)}
WANTED = {
    "model.embed.weight": (9, 4),
    **{f"model.layers.{k}.{rest}": shape for k in range(3) for rest, shape in BLOCK.items()},
    "model.norm.weight": (4,),
    "head.weight": (9, 4),
}


def test_layers_of_a_pipeline_are_the_models_blocks_in_order() -> None:
    found = {
        "0.weight": (9, 4),
        **{f"{k}.layer.{rest}": shape for k in (2, 3, 5) for rest, shape in BLOCK.items()},
        "7.weight": (4,),
        "8.weight": (9, 4),
    }
    names = pipeline_names(found, WANTED)
    assert names["model.embed.weight"] == "0.weight" and names["head.weight"] == "8.weight"
    assert names["model.norm.weight"] == "7.weight"
    assert names["model.layers.2.norm.weight"] == "5.layer.norm.weight"
    assert set(names) == set(WANTED) and set(names.values()) == set(found)


def test_tied_weights_and_what_could_be_two_things() -> None:
    blocks = {f"{k + 1}.{rest}": shape for k in range(3) for rest, shape in BLOCK.items()}
    wanted = {name: shape for name, shape in WANTED.items() if name != "head.weight"}
    tied = {"tied_modules.embed.weight": (9, 4), **blocks, "4.weight": (4,)}
    assert pipeline_names(tied, wanted)["model.embed.weight"] == "tied_modules.embed.weight"
    names = pipeline_names({**blocks, "4.weight": (4,), "5.weight": (4,)}, wanted)
    assert "model.norm.weight" not in names and "model.embed.weight" not in names


def cut(folder: Path, info: object) -> None:
    """Save two tensor ranks, each with a slice along the first dimension of `a`."""
    for rank in range(2):
        place = save(
            folder / f"{rank}",
            [{f"r{rank}.a": [2, 3], "norm": [3]}],
            stage=1,
            ranks=1,
            mp_world_size=2,
            param_shapes=[{"a": torch.Size([2, 3]), "norm": torch.Size([3])}],
            universal_checkpoint_info=info,
        )
        for file in place.iterdir():
            file.rename(folder / file.name.replace("mp_rank_00", f"mp_rank_{rank:02d}"))


@pytest.mark.parametrize("rows", [False, True])
def test_slices_are_joined_along_the_dimension_that_the_files_say(
    tmp_path: Path, rows: bool
) -> None:
    info = {"tp_replicated_parameter_patterns": ["^norm$"]}
    info |= {"parameter_with_row_parallelism_patterns": ["^a$"]} if rows else {}
    cut(tmp_path, info)
    source = open_source(tmp_path)
    slices = [values_of(f"r{rank}.a", [2, 3], "exp_avg") for rank in range(2)]
    whole = torch.cat(slices, dim=int(rows))
    assert source.shapes["a"] == tuple(whole.shape)
    assert torch.equal(source.read("a", "exp_avg", 0, 12), whole.view(-1))
    assert torch.equal(source.read("a", "exp_avg", 4, 9), whole.view(-1)[4:9])
    assert torch.equal(source.read("norm", "master", 0, 3), values_of("norm", [3], "fp32"))


@pytest.mark.parametrize(
    "info",
    [
        {},
        {
            "tp_replicated_parameter_patterns": ["norm"],
            "parameter_with_sub_params": [{"patterns": ["a"]}],
        },
    ],
)
def test_slices_of_unknown_cuts_are_refused_with_the_way(tmp_path: Path, info: object) -> None:
    cut(tmp_path, info)
    with pytest.raises(TrainctlError, match=r"how") as error:
        open_source(tmp_path)
    assert "ds_to_universal" in error.value.hint


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    cut(tmp_path, {"tp_replicated_parameter_patterns": ["norm"]})
    (tmp_path / "mp_rank_01_model_states.pt").unlink()
    (tmp_path / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(TrainctlError, match="mp_rank_01_model_states"):
        open_source(tmp_path)
