"""Names of a source's parameters matched with those of the planned model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainctl.errors import RunStateError
from trainctl.migration.checkpoints.source import Source

_WRAPPERS = re.compile(r"(^|(?<=\.))(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
"""Parts of names that wrappers of torch add: FSDP, `torch.compile`, activation checkpointing."""

_PIECE = 1 << 24
"""Elements of two tied weights that are compared at a time."""


def match_names(
    source: Source, shapes: Mapping[str, Sequence[int]], tied: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], set[str]]:
    """Return the source's name of each of the model's parameters that it has, in their order; and
    the source's further tensors of tied weights, which are equal.

    Parts that wrappers add anywhere are ignored, as is one prefix that all names of the source
    have in common (`module.`, or the attribute of a class around the model).

    Args:
        shapes: Shapes of the model's parameters, by canonical name.
        tied: Further names of the model's tied weights, by canonical name.

    Raises:
        TrainctlError: Two tensors of the source would be one tied weight, and they differ.
    """
    plain = {without_wrappers(name): name for name in source.shapes}
    prefix = common_prefix(plain, shapes)
    found = {name.removeprefix(prefix): there for name, there in plain.items()}
    matched: dict[str, str] = {}
    copies: set[str] = set()
    for name in shapes:
        under = [found[each] for each in (name, *tied.get(name, ())) if each in found]
        if not under:
            continue
        matched[name] = under[0]
        for other in under[1:]:
            _check_tied(source, name, under[0], other)
            copies.add(other)
    return matched, copies


def without_wrappers(name: str) -> str:
    """Return a parameter's name without the parts that wrappers of torch add."""
    return _WRAPPERS.sub("", name)


def common_prefix(names: Collection[str], wanted: Mapping[str, Sequence[int]]) -> str:
    """Return the prefix without which most of the wanted names are found; often empty."""
    first = next(iter(wanted), "")
    candidates = {name.removesuffix(first) for name in names if name.endswith(first)} | {""}
    return max(
        sorted(candidates, key=len),
        key=lambda prefix: sum(prefix + name in names for name in wanted),
    )


def order_by_shape(
    shapes: Mapping[str, Sequence[int]], optimizer: Mapping[str, Any], path: Path
) -> dict[str, int]:
    """Return the number of each parameter in the `state_dict` of an optimizer of torch.

    It has no names: numbers follow the parameter groups, and within a group the model's order. With
    several groups, the shapes of the states tell which parameters are in which group.

    Args:
        shapes: Shapes of the parameters in the model's order, each tied weight once.
        optimizer: The `state_dict`, with `LazyTensor`s.
        path: File to name in errors.

    Raises:
        TrainctlError: The numbers of the parameters do not follow from it.
    """
    queues = [list(group["params"]) for group in optimizer["param_groups"]]
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        fitting = [queue for queue in queues if queue and _has_shape(optimizer, queue[0], shape)]
        if len(fitting) != 1:
            break
        found[name] = fitting[0].pop(0)
    if len(found) < len(shapes) or any(queues):
        raise RunStateError(
            f"{path}: which of the optimizer's states belong to which parameters does not follow "
            "from their shapes, and their names are not saved",
            hint="save with one parameter group, or with ZeRO 1, which saves the names",
        )
    return found


def _has_shape(optimizer: Mapping[str, Any], number: int, shape: Sequence[int]) -> bool:
    """Return True if a parameter's states have the shape; also if it has none."""
    states = optimizer["state"].get(number, {}).values()
    shaped = [tuple(each.shape) for each in states if getattr(each, "shape", ())]
    return all(each == tuple(shape) for each in shaped)


def _check_tied(source: Source, name: str, first: str, other: str) -> None:
    """Refuse two tensors that the model ties, unless they are equal.

    Raises:
        TrainctlError: They differ (exit code 5).
    """
    numel = torch.Size(source.shapes[first]).numel()
    same = source.shapes[first] == source.shapes[other]
    for start in range(0, numel, _PIECE) if same else ():
        end = min(start + _PIECE, numel)
        here, there = (source.read(each, "master", start, end) for each in (first, other))
        same = same and torch.equal(here, there)
    if not same:
        raise RunStateError(
            f"{source.path}: {first} and {other} differ, and the model has one weight for both "
            f"({name})",
            hint="model.tie_word_embeddings=false",
        )
