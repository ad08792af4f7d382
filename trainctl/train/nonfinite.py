"""Location of a step's NaN or infinity: in a weight, an activation or a gradient.

The search runs once the step is known to be bad, on what each rank holds: the master weights of
trained parameters, their gradients, and, if these weights are finite, a repeated forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainctl.engines.micro_batch import MicroBatch
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.evaluation import inference
from trainctl.train.session import Session

LISTED_NAMES = 8
"""Most names that a record lists."""

WEIGHT, ACTIVATION, GRADIENT, LOSS = "weight", "activation", "gradient", "loss"


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Weights, activations or gradients with values that are not finite, over all ranks."""

    kind: str
    """`WEIGHT`; `ACTIVATION`, the output of a module whose weights are finite; `GRADIENT`; or
    `LOSS` where nothing else was found."""
    names: tuple[str, ...] = ()
    """Canonical names: weights in the model's order, gradients in reverse order."""
    ranks: tuple[int, ...] = ()
    """Ranks that hold such values."""

    def record(self) -> dict[str, Any]:
        """Return the fields of the intervention record."""
        return {
            "in": self.kind,
            "names": list(self.names[:LISTED_NAMES]),
            "count": len(self.names),
            "ranks": list(self.ranks),
        }


def bad_gradients(session: Session) -> list[str]:
    """Return the names of parameters whose gradient on this rank is not finite.

    The gradients must be visible.
    """
    norms = session.engine.states.norms()
    return sorted({fragment.name for fragment, norm in norms if _is_bad(norm)})


def locate(
    session: Session, batches: Sequence[MicroBatch], gradients: list[str], *, in_loss: bool
) -> NotFinite:
    """Find what is not finite. All ranks call it together, after discarding the gradients.

    Args:
        batches: This rank's micro-batches of the step.
        gradients: Result of `bad_gradients` on this rank.
        in_loss: Whether the loss itself is not finite, rather than only its gradient.
    """
    order = {name: place for place, name in enumerate(session.shapes)}

    def over_ranks(kind: str, own: Iterable[str], *, backward: bool = False) -> NotFinite | None:
        gathered = session.process.gather(list(own))
        names = sorted(set().union(*gathered), key=lambda name: order.get(name, len(order)))
        ranks = tuple(rank for rank, found in enumerate(gathered) if found)
        return NotFinite(kind, tuple(names[::-1] if backward else names), ranks) if names else None

    found = over_ranks(WEIGHT, _bad_weights(session))
    if found is None and in_loss:
        found = _find_bad_module(session, batches)
    elif found is None:
        # The first bad gradient spoils those after it in the backward pass, towards the input.
        found = over_ranks(GRADIENT, gradients, backward=True)
    return found or NotFinite(LOSS if in_loss else GRADIENT)


def _bad_weights(session: Session) -> list[str]:
    """Return the names of trained parameters whose master weights on this rank are not finite."""
    state, found = session.state, set()
    for index in range(len(state.tensors)):
        with state.swapped_in(index):
            values = state.tensor(index, MASTER)
            if _is_bad(values):
                here = [fragment for fragment in state.fragments if fragment.tensor == index]
                found |= {fragment.name for fragment in here if _is_bad(fragment.of(values))}
    return sorted(found)


def _find_bad_module(session: Session, batches: Sequence[MicroBatch]) -> NotFinite | None:
    """Repeat the forward pass; return the first frozen weight or output that is not finite."""
    if session.plan.config.kernels.is_compiled:
        return None  # compiled modules call no hooks
    engine = session.engine
    calls = 0
    found: list[tuple[int, int, str, str]] = []
    paths = module_paths(session)

    def note(kind: str, name: str) -> None:
        found.append((engine.stage, calls, kind, name))

    def before(module: nn.Module, given: Any) -> None:
        # An engine that partitions parameters has gathered them by now.
        for name, parameter in module.named_parameters(recurse=False):
            is_frozen = not parameter.requires_grad and parameter.is_floating_point()
            if is_frozen and _is_bad(parameter):
                note(WEIGHT, f"{paths[module]}.{name}")

    def after(module: nn.Module, given: Any, made: Any) -> None:
        nonlocal calls
        calls += 1  # the same count on ranks that run the same modules
        tensors = (leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
        if any(each.is_floating_point() and _is_bad(each) for each in tensors):
            note(ACTIVATION, f"{paths[module]} ({type(module).__name__})".lstrip())

    hooks = [each.register_forward_pre_hook(before) for each in engine.module.modules()]
    hooks += [each.register_forward_hook(after) for each in engine.module.modules()]
    try:
        with inference(engine.module):
            for batch in batches:
                engine.output(batch)
    finally:
        for hook in hooks:
            hook.remove()
    gathered = session.process.gather(found[:1])
    ranks = tuple(rank for rank, own in enumerate(gathered) if own)
    if not ranks:
        return None
    _, _, kind, name = min(first for own in gathered for first in own)
    return NotFinite(kind, (name,), ranks)


def module_paths(session: Session) -> dict[nn.Module, str]:
    """Return the canonical name of each module: the common prefix of its parameters' names."""
    pieces, root = session.engine.pieces, session.engine.module
    known = {piece.name for piece in pieces.values()}

    def canonical(name: str, parameter: nn.Parameter) -> list[str]:
        if parameter in pieces:
            return pieces[parameter].name.split(".")
        # An engine may have replaced the parameters by its own, under names with the same suffix.
        parts = name.split(".")
        return next((parts[i:] for i in range(len(parts)) if ".".join(parts[i:]) in known), parts)

    names = {parameter: canonical(name, parameter) for name, parameter in root.named_parameters()}
    paths = {}
    for module in root.modules():
        within = [names[parameter] for parameter in module.parameters()]
        if len(within) == 1:
            within[0] = within[0][:-1]  # without the parameter's own name
        shared = takewhile(lambda each: len(set(each)) == 1, zip(*within, strict=False))
        paths[module] = ".".join(parts[0] for parts in shared)
    return paths


def _is_bad(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isfinite().all())
