"""States of torch's optimizers, by parameter: which parameter an index of them means.

torch numbers the parameters of an optimizer through all its groups (`Optimizer.state_dict` in
torch/optim/optimizer.py). Trainers fill groups in the order of the model's parameters, so a group
is a subsequence of them, and the shapes of the states tell which (`order_by_shape`). Where shapes
leave a choice that nothing else decides, the mapping is refused.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.errors import RunStateError, TrainctlError
from trainctl.migration.checkpoints.source import Source, common_prefix, order_by_shape
from trainctl.models.hf_weights import tied_names
from trainctl.train.checkpoint.optimizer_state import MASTER

Shapes = Mapping[str, tuple[int, ...]]


class Readable(Protocol):
    """A tensor in a file, not read yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def read(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Return elements [start, end) of the flattened tensor, in its own type."""


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """State dict of an optimizer of torch.

    Attributes:
        path: File or directory to name in errors.
        state: States of each parameter, by its index or its name. A state is a `Readable` or a
            number.
        groups: Settings of each parameter group, with its `params`.
    """

    path: Path
    state: Mapping[Any, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, path: Path, content: Any) -> SavedOptimizer:
        """Return the optimizer of a state dict.

        Raises:
            TrainctlError: It is none, or its states are not for one parameter each.
        """
        known = content if isinstance(content, dict) else {}
        state, groups = known.get("state"), known.get("param_groups")
        if not isinstance(state, dict) or not isinstance(groups, list):
            raise unusable(path, "it is no state dict of an optimizer of torch")
        if not all(isinstance(each, dict) for each in (*state.values(), *groups)):
            raise unusable(path, "its states are not those of single parameters")
        return cls(path, state, groups)

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Settings of the optimizer, by the keys of trainctl's section."""
        if not self.groups:
            return {}
        first = self.groups[0]
        betas = first.get("betas")
        found: dict[str, Any] = {
            "lr": first.get("initial_lr", first.get("lr")),
            "epsilon": first.get("eps"),
        }
        if isinstance(betas, list | tuple):
            found |= dict(zip(("beta1", "beta2"), betas, strict=False))
        decays = [group["weight_decay"] for group in self.groups if "weight_decay" in group]
        found["weight_decay"] = max(decays, default=None)
        return {name: float(value) for name, value in found.items() if value is not None}

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next update, of the first group."""
        rate = self.groups[0].get("lr") if self.groups else None
        return float(rate) if isinstance(rate, int | float) else None

    def names_and_scalars(self) -> tuple[tuple[str, ...], dict[str, float]]:
        """Return the names of the states that are tensors, and the states that are one number.

        Raises:
            TrainctlError: A number differs between parameters.
        """
        names: set[str] = set()
        scalars: dict[str, float] = {}
        for parameter, states in self.state.items():
            for name, value in states.items():
                number = _number(value)
                if number is None:
                    names.add(name)
                elif scalars.setdefault(name, number) != number:
                    raise unusable(
                        self.path,
                        f"{name} of the optimizer is {number:g} for {parameter} and "
                        f"{scalars[name]:g} for another parameter",
                    )
        return tuple(sorted(names)), scalars

    def by_name(
        self, shapes: Shapes, candidate: Sequence[Sequence[str]] = ()
    ) -> dict[str, Mapping[str, Any]]:
        """Return the states of each of the model's parameters.

        Args:
            shapes: Shapes of the parameters, in the model's order.
            candidate: Names of each group's parameters as the trainer is known to make groups. They
                are taken where shapes leave a choice.

        Raises:
            TrainctlError: It is not certain which parameter an index means, or the states do not
                fit the parameters.
        """
        names, _ = self.names_and_scalars()
        if not names:
            return {}
        found = self._by_some_name(shapes, candidate)
        for name, shape in shapes.items():
            for state in names:
                value = found.get(name, {}).get(state)
                if value is None:
                    raise unusable(
                        self.path,
                        f"the optimizer's {state} of {name} is missing",
                        "a checkpoint of an adapter, or of a part of the model, is not read",
                    )
                if tuple(value.shape) != tuple(shape):
                    raise unusable(
                        self.path,
                        f"the optimizer's {state} of {name} has shape {list(value.shape)}, and the "
                        f"parameter {list(shape)}",
                    )
        return found

    def _by_some_name(
        self, shapes: Shapes, candidate: Sequence[Sequence[str]]
    ) -> dict[str, Mapping[str, Any]]:
        if all(isinstance(key, str) and not key.isdigit() for key in self.state):
            return {str(key): states for key, states in self.state.items()}
        by_index = {int(key): states for key, states in self.state.items()}
        indices = [index for group in self.groups for index in group.get("params", ())]
        if all("param_names" in group for group in self.groups):
            names = [str(name) for group in self.groups for name in group["param_names"]]
            numbers = dict(zip(names, indices, strict=True))
        else:
            numbers = self._numbers_by_shape(by_index, shapes, candidate)
        return {name: by_index.get(number, {}) for name, number in numbers.items()}

    def _numbers_by_shape(
        self,
        by_index: Mapping[int, Mapping[str, Any]],
        shapes: Shapes,
        candidate: Sequence[Sequence[str]],
    ) -> dict[str, int]:
        try:
            content = {"state": by_index, "param_groups": self.groups}
            return order_by_shape(shapes, content, self.path)
        except TrainctlError as error:
            numbers = [group.get("params", ()) for group in self.groups]
            if list(map(len, numbers)) == list(map(len, candidate)):
                pairs = zip(chain(*candidate), chain(*numbers), strict=True)
                named = {name: int(number) for name, number in pairs}
                if all(_shape_of(by_index[n]) == shapes[name] for name, n in named.items()):
                    return named
            raise unusable(
                self.path,
                error.message.removeprefix(f"{self.path}: "),
                "save it with names: Optimizer(model.named_parameters()), or "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
            ) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _number(value: Any) -> float | None:
    """Return the value of a number or of a tensor with one element and no dimension."""
    if _is_number(value):
        return float(value)
    return float(value.read().item()) if tuple(value.shape) == () else None


def _shape_of(states: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a parameter by its first state that is a tensor."""
    for value in states.values():
        if not _is_number(value) and tuple(value.shape):
            return tuple(value.shape)
    return ()


def unusable(path: Path, why: str, hint: str = "") -> TrainctlError:
    """Return the error of a checkpoint that is whole, but cannot be used (exit code 5)."""
    return RunStateError(f"{path}: {why}", hint=hint)


class TorchSource(Source):
    """Source of weights, and of the states of an optimizer of torch.

    What the optimizer's numbers mean, and how names are to be read, is known when the model is:
    `use_model` must come before `read`.

    Args:
        stored: Shapes of the weights under the names in the files.
        optimizer: The saved optimizer; None if there is none.
        verify: Checks the bytes that were read.
    """

    def __init__(
        self,
        format: str,
        path: Path,
        stored: Shapes,
        optimizer: SavedOptimizer | None,
        verify: Iterable[Callable[[], None]] = (),
    ) -> None:
        self.format, self.path, self.shapes, self.notes = format, path, stored, []
        self._optimizer, self._verify = optimizer, verify
        self._states: dict[str, Mapping[str, Any]] = {}
        if optimizer is not None:
            names, self.scalars = optimizer.names_and_scalars()
            self.states = (MASTER, *names)
            self.hyperparameters = optimizer.hyperparameters

    def use_model(self, model: PreTrainedModel) -> None:
        self._use_weights(model)
        kind = self._weights_type()
        if kind is not torch.float32:
            name = str(kind).removeprefix("torch.")
            self.notes.append(f"its weights are in {name}: the master weights begin from those")
        if self._optimizer is not None:
            trained = {name: tuple(each.shape) for name, each in model.named_parameters()}
            self._states = self._optimizer.by_name(trained, self._expected_groups(model))

    @abstractmethod
    def _use_weights(self, model: PreTrainedModel) -> None:
        """Set `shapes` to those of the weights under the model's names."""

    def _weights_type(self) -> torch.dtype:
        return self._read_weights(next(iter(self.shapes)), 0, 1).dtype

    def _expected_groups(self, model: PreTrainedModel) -> Sequence[Sequence[str]]:
        """Return the names in each parameter group as the trainer makes them; empty if unknown."""
        return ()

    @abstractmethod
    def _read_weights(self, parameter: str, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a flattened parameter's weights."""

    def read(self, parameter: str, state: str, start: int, end: int) -> torch.Tensor:
        if state == MASTER:
            return self._read_weights(parameter, start, end)
        tensor: Readable = self._states[parameter][state]
        return tensor.read(start, end)

    def verify(self) -> None:
        for check in self._verify:
            check()


DERIVED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|^freqs_cis$")
"""Tensors that follow from the configuration, which older versions of models saved."""


def match_weights(stored: Mapping[str, Readable], model: PreTrainedModel) -> dict[str, Readable]:
    """Return the weights of a state dict under the model's names.

    Tensors that the model does not have keep their names; its buffers are left out.

    Args:
        stored: Tensors by their key, without the parts that torch's wrappers add.
    """
    shapes = {name: list(each.shape) for name, each in model.named_parameters()}
    tied = tied_names(model)
    prefix = common_prefix(stored, shapes)
    found = {key.removeprefix(prefix): each for key, each in stored.items()}
    known = {name: name for name, _ in model.named_buffers()}
    known |= {other: name for name, others in tied.items() for other in others}
    matched = {}
    for name in found:
        canonical = name if name in shapes else known.get(name, name)
        if name in shapes or (canonical in shapes and canonical not in found):
            matched[canonical] = found[name]
        elif name not in known and not DERIVED.search(name):
            matched[name] = found[name]
    return matched
