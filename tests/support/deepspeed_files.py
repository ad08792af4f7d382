"""Directories in the layout of DeepSpeed's checkpoints, made without DeepSpeed.

Flat tensors are cut and padded as DeepSpeed does (runtime/zero/stage_1_and_2.py and stage3.py), for
any number of ranks, also where they do not divide a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

STATES = ("exp_avg", "exp_avg_sq")

Shapes = Sequence[Mapping[str, Sequence[int]]]
Groups = Sequence[Mapping[str, torch.Tensor]]


def values_of(name: str, shape: Sequence[int], state: str) -> torch.Tensor:
    """Return values that no other parameter and state has."""
    generator = torch.Generator().manual_seed(hash_of(f"{name}/{state}"))
    return torch.rand(tuple(shape), generator=generator)


def hash_of(text: str) -> int:
    """Return a number that is the same in every process."""
    return int.from_bytes(text.encode()[-7:], "little")


def groups_of(shapes: Shapes, state: str) -> Groups:
    """Return the values of a state, by parameter group and name."""
    return [
        {name: values_of(name, shape, state) for name, shape in group.items()} for group in shapes
    ]


def save(
    folder: Path,
    shapes: Shapes,
    *,
    stage: int,
    ranks: int,
    step: int = 7,
    prefix: str = "",
    is_elastic: bool = False,
    frozen: Mapping[str, torch.Tensor] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Path:
    """Save a checkpoint under `folder` and return the folder of its step.

    Args:
        shapes: Shapes of the trained parameters, by group.
        prefix: `bf16_` or `fp16_`, before the names of the optimizers' files.
        is_elastic: Whether states of ZeRO 1 and 2 have no padding at their end.
        frozen: Parameters that do not train.
        optimizer: Entries of the optimizer's state to change.
        facts: Entries of the model's state to change.
    """
    place = folder / f"global_step{step}"
    place.mkdir(parents=True)
    for rank in range(ranks):
        if stage == 3 or rank == 0:
            model = _model_state(shapes, step, frozen or {}, stage, ranks, rank) | facts
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(model, place / f"{name}_model_states.pt")
        make = _partitioned_parameters if stage == 3 else _partitioned_groups
        state = make(shapes, ranks, rank, step, is_elastic) | dict(optimizer or {})
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, place / name)
    (folder / "latest").write_text(place.name)
    return place


def _model_state(
    shapes: Shapes,
    step: int,
    frozen: Mapping[str, torch.Tensor],
    stage: int,
    ranks: int,
    rank: int,
) -> dict[str, Any]:
    fragments = {
        name: _partition(tensor.view(-1), ranks, rank) if stage == 3 else tensor
        for name, tensor in frozen.items()
    }
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in shapes],
        "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()},
        "frozen_param_fragments": fragments,
        "shared_params": {},
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": step * 8,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }


def _partition(values: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return a rank's equal part of flat values; the last parts are padded with zeros."""
    size = math.ceil(values.numel() / ranks)
    padded = torch.zeros(size * ranks)
    padded[: values.numel()] = values
    return padded[rank * size : (rank + 1) * size].clone()


def _hyperparameters(numbers: list[int], weight_decay: float) -> dict[str, Any]:
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    return {**settings, "params": numbers}


def _partitioned_groups(
    shapes: Shapes,
    ranks: int,
    rank: int,
    step: int,
    is_elastic: bool,
) -> dict[str, Any]:
    flats: dict[str, list[torch.Tensor]] = {}
    paddings = []
    for state in ("fp32", *STATES):
        flats[state] = []
        for group in groups_of(shapes, state):
            values = torch.cat([tensor.view(-1) for tensor in group.values()])
            aligned = 2 * ranks * math.ceil(values.numel() / (2 * ranks))
            size = aligned // ranks
            lean = max(0, min(size, values.numel() - rank * size))
            part = torch.cat([values, torch.zeros(aligned - values.numel())])
            part = part[
                rank * size : rank * size + (lean if is_elastic or state == "fp32" else size)
            ]
            flats[state].append(part.clone())
            paddings.append(size - lean)
    states = [
        {"step": torch.tensor(float(step)), **{state: flats[state][index] for state in STATES}}
        for index in range(len(shapes))
    ]
    groups = [_hyperparameters([index], 0.1) for index in range(len(shapes))]
    torch_states = {"state": dict(enumerate(states)), "param_groups": groups}
    return {
        "base_optimizer_state": states if is_elastic else torch_states,
        "single_partition_of_fp32_groups": flats["fp32"],
        "zero_stage": 1,
        "group_paddings": paddings[: len(shapes)],
        "partition_count": [ranks] * len(shapes),
    }


def _partitioned_parameters(
    shapes: Shapes,
    ranks: int,
    rank: int,
    step: int,
    is_elastic: bool,
) -> dict[str, Any]:
    flats = {
        state: [
            torch.cat([_partition(tensor.view(-1), ranks, rank) for tensor in group.values()])
            for group in groups_of(shapes, state)
        ]
        for state in ("fp32", *STATES)
    }
    states = {
        index: {"step": torch.tensor(float(step)), **{s: flats[s][index] for s in STATES}}
        for index in range(len(shapes))
    }
    groups = [_hyperparameters(list(range(len(shapes))), 0.1)]
    return {
        "zero_stage": 3,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
        "fp32_flat_groups": flats["fp32"],
    }
