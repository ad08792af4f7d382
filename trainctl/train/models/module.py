"""A torch module of the user's, seen as a transformers model (`model=module`).

All other code handles one kind of model. `ModuleModel` is a second view of the user's module: both
objects have the same attribute dictionary, so that parameters, buffers and submodules keep the
names that the user gave them, whichever of both an engine changes. Blocks get transformers' base
class of recomputed layers. `trainctl.models.module` documents what the module may define.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.check import arguments_class, call_function, check_arguments
from trainctl.config.schema import ModelConfig
from trainctl.data.user_functions import load_user_function
from trainctl.errors import TrainctlError
from trainctl.train.models.weights import (
    InitializedRange,
    Initializers,
    InitRecorder,
    NonShardableInit,
    WholeInitializer,
    constant_initializer,
    storage_id,
)

MODEL_TYPE = "module"
VIEW = "_trainctl_view"
"""Entry of the shared attribute dictionary that only `ModuleModel` reads."""


@dataclass(frozen=True, slots=True)
class _View:
    """Attributes of the transformers side of a module."""

    module: nn.Module
    config: PretrainedConfig
    started: ConstructorInit | None
    embedding: nn.Embedding | None = None
    """Embedding of the tokens, outside the blocks."""
    head: nn.Linear | None = None
    """Last linear layer outside the blocks with a row for each token."""


def shallow_copy(module: Any) -> Any:
    """Return a module with the same parameters and submodules, any of which may be replaced."""
    copied = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[name] = dict(copied.__dict__[name])
    return copied


class ModuleModelConfig(PretrainedConfig):
    """Configuration of a user's module, as the interface of transformers asks for one."""

    model_type = MODEL_TYPE


class ModuleModel(PreTrainedModel):
    """View of a user's module with the interface of a transformers model."""

    config_class = ModuleModelConfig

    @classmethod
    def of(
        cls, module: nn.Module, model: ModelConfig, started: ConstructorInit | None = None
    ) -> ModuleModel:
        """Return the view of a module, whose blocks become recomputable in place.

        Args:
            started: Record of its constructors; None for a module whose values are not wanted.
        """
        config = ModuleModelConfig(architectures=[type(module).__name__])
        for name in ("vocab_size", "hidden_size", "num_attention_heads"):
            setattr(config, name, getattr(model, name))
        config.num_hidden_layers = model.num_layers
        made: ModuleModel = cls.__new__(cls)
        object.__setattr__(made, "__dict__", module.__dict__)
        module.__dict__[VIEW] = view = _View(module, config, started)
        blocks = made.own_blocks()
        # Found while the module is whole: tensor ranks and stages have other sizes and parts.
        ends = _vocabulary_ends(module, blocks, config.vocab_size)
        module.__dict__[VIEW] = replace(view, embedding=ends[0], head=ends[1])
        for block in blocks:
            block.__class__ = _recomputable(block.__class__)
        return made

    def shallow_copy(self) -> ModuleModel:
        """Return a view of a shallow copy of the module."""
        module, made = shallow_copy(self.module), type(self).__new__(type(self))
        object.__setattr__(made, "__dict__", module.__dict__)
        module.__dict__[VIEW] = replace(self.__dict__[VIEW], module=module)
        return made

    @property
    def config(self) -> PretrainedConfig:  # type: ignore[override]
        """Configuration; the module may have an attribute of that name."""
        return self.__dict__[VIEW].config

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self.__dict__[VIEW].module

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **further: Any,
    ) -> CausalLMOutput:
        """Return the logits of a batch."""
        found = self.hidden_states(input_ids, position_ids, **further)
        return CausalLMOutput(logits=self.head(found) if self.returns_hidden_states else found)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a part of the user's module, which may have the name of a method of this view."""
        return self.module.get_submodule(target)

    @property
    def returns_hidden_states(self) -> bool:
        """Whether the module's `forward` ends before the logits."""
        return _method(self.module, "logits") is not None

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **further: Any,
    ) -> torch.Tensor:
        """Return what the module's `forward` gives, out of its tuple or object."""
        if position_ids is None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = places.expand(input_ids.shape[:2])  # hidden states, on a stage
        # `forward` and not a call: the hooks of the shared dictionary run around this view.
        found = self.module.forward(input_ids, position_ids, **further)
        found = found[0] if isinstance(found, tuple | list) else found
        for name in ("logits", "last_hidden_state"):
            found = getattr(found, name, found)
        return found

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of last hidden states."""
        method = _method(self.module, "logits")
        assert method is not None
        return method(hidden)

    def own_blocks(self) -> list[nn.Module]:
        """Return the module's blocks, in order."""
        found = getattr(self.module, "blocks", None)
        if isinstance(found, nn.ModuleList | nn.Sequential):
            return list(found)
        if found is not None and not isinstance(found, nn.Module):
            return list(found() if callable(found) else found)
        return largest_list(self)

    def no_decay(self) -> tuple[str, ...]:
        """Return the names of the parameters that the module keeps from weight decay.

        Raises:
            TrainctlError: It names what is none of its parameters.
        """
        method = _method(self.module, "no_decay")
        names = tuple(method()) if method is not None else ()
        known = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        for name in names:
            if name not in known:
                raise TrainctlError(
                    f"{type(self.module).__name__}.no_decay() names {name!r}, which is no parameter"
                )
        return names

    def flops_per_token(self, sequence_length: int) -> float | None:
        """Return the module's own count of operations; None if it has none."""
        method = _method(self.module, "flops_per_token")
        return None if method is None else float(method(sequence_length))

    @property
    def masks_documents(self) -> bool:
        return bool(getattr(self.module, "masks_documents", False))

    def get_output_embeddings(self) -> Any:
        """Return the layer that gives the logits; None on a pipeline stage without it."""
        return self._if_here(self.__dict__[VIEW].head)

    def get_input_embeddings(self) -> Any:
        """Return the embedding of the tokens; None on a pipeline stage without it."""
        return self._if_here(self.__dict__[VIEW].embedding)

    def _if_here(self, layer: nn.Module | None) -> nn.Module | None:
        return layer if layer in set(self.modules()) else None

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """Do nothing: the module has tied its weights itself."""

    def own_initializers(self) -> Initializers:
        """Return how each parameter starts: by `initialize`, else as constructors started it.

        Raises:
            NonShardableInit: Only the constructor knows the values of a parameter.
        """
        names = {parameter: name for name, parameter in self.named_parameters()}
        started = self.__dict__[VIEW].started
        assert started is not None, "only a skeleton knows its initial values"
        found = started.of(names)
        method = _method(self.module, "initialize")
        own: Initializers = {}
        for parameter, name in names.items():
            if method is None:
                break
            try:
                with torch.no_grad(), InitRecorder({parameter: name}) as recorder:
                    method(name, parameter)
                own |= recorder.laws
            except (NonShardableInit, RuntimeError):  # it copies values, or looks at them
                law = WholeInitializer(partial(method, name))
                own[name] = [InitializedRange(0, parameter.numel(), law)]
        for name, operation in found.unknown.items():
            if name not in own:
                raise NonShardableInit(name, operation)
        return found.laws | own


def adapt_module(model: ModelConfig, *, on_meta: bool) -> ModuleModel:
    """Return the view of the module that `model.factory` makes.

    Args:
        on_meta: Whether parameters go to the meta device, with a record of how they start.

    Raises:
        TrainctlError: The function's arguments are wrong, or it returns no module.
    """
    assert model.factory is not None
    named = f"model.factory={model.factory}"
    function = load_user_function("model.factory", model.factory)
    with (
        torch.random.fork_rng(devices=[]),
        record_constructors() if on_meta else nullcontext() as started,
    ):
        # Buffers that a constructor draws are the same on every rank, and in what loads an export.
        torch.default_generator.manual_seed(0)
        built = call_function(function, getattr(model, "arguments", {}), named)
    if not isinstance(built, nn.Module) or isinstance(built, PreTrainedModel):
        raise TrainctlError(
            f"{named} gave a {type(built).__name__}",
            hint="with model=module return a torch.nn.Module; one of transformers goes with any "
            "other model=... and takes the model section",
        )
    if started is not None:
        started.find_parameters(built)
    return ModuleModel.of(built, model, started)


def complete_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return all arguments of the function `model.factory`, as plain data.

    Raises:
        TrainctlError: One is unknown or of another type (exit code 2).
    """
    assert model.factory is not None
    function = load_user_function("model.factory", model.factory)
    cls = arguments_class(function, f"model.factory={model.factory}")
    return check_arguments(cls, getattr(model, "arguments", {}), "model.arguments")


def _vocabulary_ends(
    module: nn.Module, blocks: Sequence[nn.Module], vocabulary: int
) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """Return the embedding of the tokens and the head of a whole module, where it has them.

    Args:
        vocabulary: Rows of the head of a module without any embedding.
    """
    inside = {each for block in blocks for each in block.modules()}
    outside = [each for each in module.modules() if each not in inside]
    embeddings = [each for each in outside if isinstance(each, nn.Embedding)]
    rows = {each.num_embeddings for each in embeddings} or {vocabulary}
    heads = [each for each in outside if isinstance(each, nn.Linear) and each.out_features in rows]
    head = heads[-1] if heads else None
    # Another embedding, such as that of positions, may come first.
    tokens = [
        each for each in embeddings if head is None or each.num_embeddings == head.out_features
    ]
    return next(iter(tokens), None), head


def largest_list(built: nn.Module) -> list[nn.Module]:
    """Return the children of the `ModuleList` with the most parameters; empty without one."""
    lists = [module for module in built.modules() if isinstance(module, nn.ModuleList)]

    def size(each: nn.Module) -> int:
        return sum(parameter.numel() for parameter in each.parameters())

    return list(max(lists, key=size, default=nn.ModuleList()))


@cache
def _recomputable(block: Any) -> Any:
    """Return a block's class with the base class that `recompute.wrap_blocks` looks for."""
    if issubclass(block, GradientCheckpointingLayer):
        return block
    bases, module = (GradientCheckpointingLayer, block), block.__module__
    return type(block.__name__, bases, {"__module__": module, "__qualname__": block.__qualname__})


def _method(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return an optional method of a module; a submodule or a tensor of that name is none."""
    found = getattr(module, name, None)
    return found if callable(found) and not isinstance(found, nn.Module) else None


COMPUTED = "values that its constructor computes"

FRESH = frozenset({"aten::empty.memory_format", "aten::empty_strided", "aten::new_empty"})
"""Operations that return a tensor without values."""


@dataclass
class _Started:
    """Initial values of parameters, by canonical name."""

    laws: Initializers
    unknown: dict[str, str] = field(default_factory=dict)
    """Parameters whose values only the constructor knows, with the operation that made them."""


class ConstructorInit(InitRecorder):
    """Dispatch mode that records how constructors start each parameter.

    Constructors draw on parameters that are on the meta device already, so that no rank holds a
    weight. A parameter that is registered with values keeps them if they are all equal.
    """

    def __init__(self) -> None:
        super().__init__({})
        self._keys: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._moved: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._origins: dict[int, tuple[Any, Any]] = {}
        self._unknown: dict[str, str] = {}
        self._fresh: set[int] = set()

    def to_meta(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter's stand-in on the meta device, the same for the same parameter."""
        if parameter in self._moved:
            return self._moved[parameter]
        storage = storage_id(parameter)
        if storage in self._known:
            return parameter
        made = parameter
        if not parameter.is_meta:
            made = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            self._moved[parameter] = made
        key = self._watch(made)
        if storage in self._fresh:
            self._fresh.discard(storage)
        elif parameter.is_meta:
            self._unknown[key] = COMPUTED
        else:
            self._keep_values(key, parameter.detach())
        if made is not parameter:  # its constructor may go on with what it has registered
            self._origins[storage] = weakref.ref(parameter), made
        return made

    def find_parameters(self, built: nn.Module) -> None:
        """Recognise the parameters of a finished module, before their storages are replaced."""
        for parameter in built.parameters():
            if (known := self._known.get(storage_id(parameter))) is not None:
                self._keys[parameter] = known[0]

    def of(self, names: dict[nn.Parameter, str]) -> _Started:
        """Return what was recorded of the parameters of a finished module."""
        keys = {name: self._keys[each] for each, name in names.items() if each in self._keys}
        unknown = {name: COMPUTED for name in names.values() if name not in keys}
        unknown |= {name: self._unknown[key] for name, key in keys.items() if key in self._unknown}
        laws = {name: self.laws[key] for name, key in keys.items() if key in self.laws}
        return _Started(laws, unknown)

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all of a recorded one, and not a part of it."""
        known = self._known.get(storage_id(tensor))
        return known is not None and tensor.is_contiguous() and tensor.shape == known[1].shape

    def _watch(self, tensor: Any) -> str:
        """Return the key under which all that is done to a tensor is recorded from now on."""
        key = str(len(self._known))
        self._known[storage_id(tensor)] = (key, tensor)
        return key

    def _keep_values(self, key: str, values: torch.Tensor) -> None:
        flat = values.reshape(-1)
        if flat.numel() and bool((flat == flat[0]).all()):
            law = constant_initializer(float(flat[0]))
            self.laws[key] = [InitializedRange(0, flat.numel(), law)]
        else:
            self._unknown[key] = COMPUTED

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable:
            if args and isinstance(args[0], torch.Tensor):
                storage = storage_id(args[0])
                self._fresh.discard(storage)
                origin, made = self._origins.get(storage, (None, None))
                if origin is not None and origin() is not None:
                    self._note(self._known[storage_id(made)][0], made, args[0], func, args[1:])
        elif func.name() == "aten::clone" and self._is_whole(args[0]):  # a block is copied
            source, key = self._known[storage_id(args[0])][0], self._watch(output)
            self.laws |= {key: list(self.laws[source])} if source in self.laws else {}
            self._unknown |= {key: self._unknown[source]} if source in self._unknown else {}
        elif isinstance(output, torch.Tensor):
            shared = {storage_id(each) for each in args if isinstance(each, torch.Tensor)}
            if func.name() in FRESH:
                self._fresh.add(storage_id(output))
            elif storage_id(output) not in shared:  # no view: other values, maybe at a freed place
                self._fresh.discard(storage_id(output))
        return output

    def _note(self, name: str, *rest: Any) -> None:
        try:
            super()._note(name, *rest)
        except NonShardableInit as found:
            self._unknown[name] = found.operation
        else:
            self._unknown.pop(name, None)


@contextmanager
def record_constructors() -> Iterator[ConstructorInit]:
    """Record how parameters start, and keep their values off this process's memory."""
    recorder = ConstructorInit()
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, None if param is None else recorder.to_meta(param))

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with recorder:
            yield recorder
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def require_first_argument(blocks: Sequence[nn.Module]) -> None:
    """Refuse blocks that are called without a positional argument, once the module runs."""
    for block in blocks:
        block.register_forward_pre_hook(_refuse_keywords, with_kwargs=True)


def _refuse_keywords(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not args or not isinstance(args[0], torch.Tensor):
        raise TrainctlError(
            f"{type(block).__name__} is a block and gets its hidden states by keyword",
            hint="block(hidden, ...): the first argument is what recomputation keeps",
        )
