"""Check of a module's own plans of layouts, before a run starts, on tensors without values.

The module is cut as ranks cut it, and runs forward; torch's "fake" process group stands for the
other ranks. What autograd recorded then shows whether the cut module computes the same: which
parameters a rank uses between a summed input and a summed output, and whether stages one after the
other do what the whole module does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from trainctl.data import user_functions as user_code
from trainctl.engines.process import Axis
from trainctl.errors import TrainctlError
from trainctl.train.models.model import whole_pieces
from trainctl.train.models.module import ModuleModel
from trainctl.train.parallel.experts import Copy, Reduce
from trainctl.train.parallel.module_plan import (
    read_pipeline_plan,
    read_tensor_plan,
    vocabulary_layers,
)
from trainctl.train.parallel.pipeline import cut_to_stage
from trainctl.train.parallel.tensor import shard_model

Make = Callable[[], ModuleModel]
"""Builds the whole model, with fake tensors."""

TOKENS = 5
"""Length of the forward pass, unlike the sizes that ranks divide."""

MOST_RANKS = 64
"""Largest number of tensor ranks that is tried."""

REDUCING = {
    *("sum", "mean", "prod", "var", "std", "norm", "linalg_vector_norm", "logsumexp", "amax"),
    *("amin", "cumsum", "cumprod", "_softmax", "_log_softmax", "sort", "topk", "argmax"),
    *("split", "split_with_sizes", "slice", "narrow", "flip", "roll"),
}
"""Operations on the whole of a dimension, which ranks do not have if it is cut."""

DEFAULT_DIMS = {"split": 0, "split_with_sizes": 0, "slice": 0, "sort": -1, "topk": -1}
"""Dimension of an operation that is not told any; others then work on all."""

CONTRACTING = {"bmm", "baddbmm", "native_layer_norm", "_fused_rms_norm", "native_group_norm"}
"""Operations on the whole of the first argument's last dimension; so is attention."""


def module_layouts(make: Callable[[], Any]) -> tuple[dict[str, int], dict[str, str]]:
    """Return what tensor ranks share of a module, and why an axis cannot split it.

    Args:
        make: Builds the whole model, with fake tensors.

    Returns:
        The number of equal parts that tensor ranks can divide, by name of a cut parameter; and the
        reason for each axis that cannot split the module by its own plans.
    """
    shares: dict[str, int] = {}
    unsplit: dict[str, str] = {}
    try:
        shares = tensor_shares(make)
    except TrainctlError as error:
        unsplit["tensor"] = " ".join(error.message.split())
    try:
        check_stages(make)
    except TrainctlError as error:
        unsplit["pipeline"] = " ".join(error.message.split())
    return shares, unsplit


def tensor_shares(make: Make) -> dict[str, int]:
    """Return the number of equal parts that tensor ranks can divide, by name of a cut parameter.

    Raises:
        TrainctlError: Tensor ranks cannot split the module by its plan; says why.
    """
    whole = make()
    plan = read_tensor_plan(whole.module)
    names = {parameter: name for name, parameter in whole.named_parameters()}
    if plan.unmatched:
        raise TrainctlError(f"tensor_plan() names {plan.unmatched[0]}, and nothing has that name")
    if not plan.columns or not plan.rows:
        raise TrainctlError("tensor_plan() has to name layers for colwise and for rowwise")
    vocabulary = vocabulary_layers(whole)
    if len(vocabulary) < 2:
        raise TrainctlError(
            "tensor ranks split the vocabulary, and outside of its blocks it has no nn.Embedding "
            "or no nn.Linear with a row for each token"
        )
    _require_whole_ties(whole, plan.cut_parameters, names)
    for layer in vocabulary:
        if not {*layer.parameters()}.isdisjoint(plan.cut_parameters):
            raise TrainctlError(
                f"tensor_plan() names {names[layer.weight]}, which is split by tokens anyway"
            )
    sizes = plan.sizes
    common = math.gcd(*sizes.values())
    counts = [n for n in range(min(common, MOST_RANKS), 1, -1) if common % n == 0]
    if not counts:
        smallest = sorted(sizes, key=lambda name: sizes[name])[:2]
        raise TrainctlError(
            "no number of ranks divides all that tensor_plan() cuts: "
            + ", ".join(f"{name}={sizes[name]}" for name in smallest)
        )
    with _ReducedSizes() as expected, _in_words(whole, "tensor_plan()"):
        _run(whole, _tokens())
    wrong = TrainctlError("")
    for count in counts:
        try:
            _check_cut(make, count, expected)
        except TrainctlError as found:
            wrong = found
            continue
        shares = dict.fromkeys((names[parameter] for parameter in plan.cut_parameters), count)
        tokens = {each for layer in vocabulary for each in layer.parameters()}
        return shares | {names[parameter]: parameter.shape[0] for parameter in tokens}
    raise wrong


def _require_whole_ties(
    model: nn.Module, cut: set[nn.Parameter], names: dict[nn.Parameter, str]
) -> None:
    """Refuse a cut parameter that is also used where the plan does not cut it."""
    aliases = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name != names[parameter] and parameter in cut
    }
    for name, parameter in aliases.items():
        raise TrainctlError(
            f"tensor_plan() cuts {names[parameter]}, which is also {name}: a weight that is used "
            "twice stays whole"
        )


def _check_cut(make: Make, count: int, expected: _ReducedSizes) -> None:
    """Refuse a module that does not compute the same on each of `count` tensor ranks."""
    part = make()
    with other_ranks(count) as axis:
        pieces = shard_model(part, whole_pieces(part), axis, sequence_sharded_norms=False)
        with _ReducedSizes() as found, _in_words(part, f"cut by tensor_plan() for {count} ranks"):
            output = _run(part, _tokens())
    for one, other in zip(expected.sizes, found.sizes, strict=False):
        if one != other:
            raise TrainctlError(
                f"cut by tensor_plan() for {count} ranks, {other[0]} works on {other[1:]} in place "
                f"of {one[1:]}: name the attribute that holds the number of heads, or cut less"
            )
    for parameter, (inside, outside) in _uses(output).items():
        piece = pieces[parameter]
        if inside and outside:
            raise TrainctlError(
                f"{piece.name} is used both inside and outside of what tensor_plan() cuts"
            )
        if not piece.shard.is_whole and outside:
            raise TrainctlError(
                f"tensor_plan() cuts {piece.name}, and no rowwise layer sums what follows from it"
            )
        if piece.shard.is_whole and inside and piece.gradient_parts == 1:
            raise TrainctlError(
                f"every rank has {piece.name} whole, and uses it for its own channels: "
                'tensor_plan() has to cut it, or say "replicated_with_grad_allreduce"'
            )


def _uses(output: torch.Tensor) -> dict[nn.Parameter, tuple[bool, bool]]:
    """Return whether each parameter is used inside and outside of cut parts, for the logits.

    The logits themselves are split over the vocabulary. Backward, an input that ranks share ends a
    part (`Copy`), and an output that they sum begins one (`Reduce`).
    """
    found: dict[nn.Parameter, tuple[bool, bool]] = {}
    waiting: list[tuple[Any, bool]] = [(output.grad_fn, True)]
    seen = set()
    while waiting:
        node, inside = waiting.pop()
        if node is None or (node, inside) in seen:
            continue
        seen.add((node, inside))
        kind = getattr(node, "_forward_cls", None)
        if kind in (Copy, Reduce):
            if inside is not (kind is Copy):
                raise TrainctlError(
                    "tensor_plan() has a colwise layer behind another, or a rowwise layer with "
                    "none before it"
                )
            inside = kind is Reduce
        if hasattr(node, "variable"):
            within, beside = found.get(node.variable, (False, False))
            found[node.variable] = (within or inside, beside or not inside)
        waiting += [(following, inside) for following, _ in node.next_functions]
    return found


class _ReducedSizes(TorchDispatchMode):
    """Dispatch mode that records the sizes of the dimensions that operations need whole."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in CONTRACTING or "attention" in name:
            self.sizes.append((name, args[0].shape[-1]))
        elif name in REDUCING:
            names = [each.name for each in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            dims = given.get("dim", given.get("dims", DEFAULT_DIMS.get(name)))
            dims = (dims,) if isinstance(dims, int) else dims or range(args[0].dim())
            self.sizes.append((name, *(args[0].shape[each] for each in dims)))
        return func(*args, **(kwargs or {}))


def check_stages(make: Make) -> None:
    """Refuse a module whose stages, one after the other, do not compute what the whole does.

    Raises:
        TrainctlError: Pipeline stages cannot split the module by its plan; says why.
    """
    whole = make()
    count = len(whole.own_blocks())
    if count < 2:
        raise TrainctlError("it has a single block")
    _require_own_weights(whole)
    with _in_words(whole, "pipeline_plan()"):
        expected = _run(whole, _tokens())
    cuts = (0, 1, count - 1, count) if count > 2 else (0, 1, count)
    states = _tokens()
    for index, (first, end) in enumerate(pairwise(cuts)):
        stage = make()
        axis = Axis(index, tuple(range(len(cuts) - 1)), group=None)  # type: ignore[arg-type]
        cut_to_stage(stage, range(first, end), axis)
        with _in_words(whole, f"as stage {index + 1} of {axis.size} by pipeline_plan()"):
            states = _run(stage, states, is_last=axis.is_last)
    if states.shape != expected.shape or _operations(states) != _operations(expected):
        raise TrainctlError(
            "its stages one after the other do not compute what the whole module does: forward may "
            "do nothing to hidden states but call the parts that pipeline_plan() lists"
        )


def _require_own_weights(model: ModuleModel) -> None:
    """Refuse a weight of two stages, unless it is that of the embedding and the head."""
    owners: dict[nn.Parameter, Any] = {}
    inside = {each: block for block in model.own_blocks() for each in block.modules()}
    tied = {parameter for layer in vocabulary_layers(model) for parameter in layer.parameters()}
    before, middle, after = read_pipeline_plan(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False):
            name, owner = f"{path}.{key}".removeprefix("."), inside.get(module)
            if name.split(".")[0] not in (*before, middle, *after):
                raise TrainctlError(f"{name} is in none of the parts that pipeline_plan() lists")
            if parameter not in tied and owners.setdefault(parameter, owner) is not owner:
                raise TrainctlError(f"{name} is also the weight of another part")


def _operations(output: torch.Tensor) -> list[str]:
    """Return the names of the operations that autograd recorded, backward from the output."""
    found, waiting, seen = [], [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not hasattr(node, "variable"):  # a tied weight is one here and two on stages
            found.append(node.name())
        waiting += [following for following, _ in node.next_functions]
    return found


def _run(model: ModuleModel, states: torch.Tensor, *, is_last: bool = True) -> torch.Tensor:
    """Return the logits, or the hidden states of a stage that is not the last."""
    if not is_last:
        return model.hidden_states(states)
    return model(states).logits


def _tokens() -> torch.Tensor:
    return torch.zeros(1, TOKENS, dtype=torch.long)


@contextmanager
def other_ranks(count: int) -> Iterator[Axis]:
    """Stand for `count` tensor ranks, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield Axis(0, tuple(range(count)), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@contextmanager
def _in_words(model: ModuleModel, what: str) -> Iterator[None]:
    """Turn an exception of the module's code into one sentence."""
    try:
        yield
    except TrainctlError:
        raise
    except Exception as error:
        file = inspect.getfile(type(model.module))
        raise TrainctlError(f"{what}: {user_code.in_words(error, file)}") from error
