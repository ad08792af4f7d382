"""The anatomy of a model of transformers, from its class and configuration; no weights are made.

The model is built on fake tensors, which have shapes and no values, and goes forward once over two
tokens with an attention that only notes what it is given: so every architecture whose attention
goes through transformers' interface is counted by what it multiplies, whatever it is called.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
)
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.anatomy import (
    Anatomy,
    Attention,
    Block,
    Parameter,
    Role,
    SavedBuffer,
    block_of,
    shape_in,
)
from trainctl.config.schema import AttentionKind, ModelConfig, RunConfig
from trainctl.data.user_functions import own_code
from trainctl.engines import declared
from trainctl.engines.patches import At
from trainctl.errors import TrainctlError
from trainctl.train.models.fake import has_own_code, in_words, way_out
from trainctl.train.models.initial import NotInParts, initial_laws
from trainctl.train.models.model import blocks, transformers_config, users_model
from trainctl.train.parallel.experts import expert_modules, routers_of
from trainctl.train.parallel.shard_plan import shares_of

BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings in transformers (modeling_rope_utils.py, dynamic_rope_update)."""

TOKENS = 2
"""A window or a chunk of one token would be another code path."""

COUNTED = "trainctl_counted"
"""Name of the attention that notes what it is given, in transformers' table."""

SHARED = ("shared_expert", "shared_mlp")
ROUTER = re.compile(r"(?:^|\.)(?:gate|router)(?:\.|$)")
"""Parts of the names of what stands beside experts."""


def anatomy(model: ModelConfig) -> Anatomy:
    """What a model is made of, by its directory or function (`trainctl.config.anatomy`).

    Raises:
        TrainctlError: It is no decoder, or its code cannot build or run it: says why.
    """
    declared.require(RunConfig(model=model), {At.trace})
    if model.factory is None:
        return _read(model)
    found = _read(model)
    # Ranks give the function the sizes of what it made, which must be the same model again.
    table = found.to_table()
    again = replace(model, **shape_in(table))
    if again != model and _read(again).to_table() != table:
        raise TrainctlError(
            f"model.factory={model.factory} makes another model when it is given the sizes of the "
            "one that it made",
            hint="take the sizes from the section as they are (shape.hidden_size), or not at all",
        )
    return replace(found, code=own_code())


def _read(model: ModelConfig) -> Anatomy:
    seen = ForwardNotes()
    AttentionInterface.register(COUNTED, seen.attend)
    with FakeTensorMode(allow_non_fake_inputs=True), in_words(model, "built"):
        if model.factory is not None:
            built = users_model(model, torch.bfloat16)
            built.config._attn_implementation = COUNTED
        else:
            config = transformers_config(model)
            _refuse(model, config)
            try:
                built = _build(model, config, COUNTED)
            except KeyError:  # older classes have a table of attentions of their own
                built = _build(model, config, AttentionKind.eager.value)
        require_blocks(built, model)
        built.tie_weights()
        built.train()
        _require_logits(built, model, _run(built, seen))
        _refuse_both_ways(model, built.config, seen)
        return replace(structure(built, model, seen), drawn_whole=_drawn_whole(built))


@dataclass(frozen=True, slots=True)
class ForwardNotes:
    """What a forward pass was seen to do."""

    attention: dict[nn.Module, Attention] = field(default_factory=dict)
    """What each attention was given to multiply, by the module that called it."""
    chosen: dict[nn.Module, int] = field(default_factory=dict)
    """How many experts a token went to, by the module that has them."""

    def attend(
        self, module: nn.Module, query: Any, key: Any, value: Any, *_: Any, **settings: Any
    ) -> Any:
        """Attention that gives a result of the right shape, and is noted."""
        window = settings.get("sliding_window")
        found = Attention(query.shape[1], query.shape[-1], value.shape[-1], window)
        self.attention[module] = found
        batch, heads, tokens, _ = query.shape
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None

    def choose(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook of experts: their second argument has the numbers of those that are chosen."""
        if len(args) > 1:
            self.chosen[module] = args[1].shape[-1]


def require_blocks(built: PreTrainedModel, model: ModelConfig) -> None:
    """Raise TrainctlError if nothing tells a model's decoder blocks."""
    if not decoder_blocks(built):
        raise TrainctlError(
            f"{type(built).__name__} has no decoder blocks that transformers knows of",
            hint=way_out(model),
        )


def decoder_blocks(built: nn.Module) -> list[nn.Module]:
    """Return the blocks: those that transformers marks, else the modules of the largest list."""
    marked = blocks(built)
    if marked:
        return list(marked)
    lists = [module for module in built.modules() if isinstance(module, nn.ModuleList)]

    def size(each: nn.Module) -> int:
        return sum(parameter.numel() for parameter in each.parameters())

    return list(max(lists, key=size, default=nn.ModuleList()))


def _require_logits(built: PreTrainedModel, model: ModelConfig, output: Any) -> None:
    """Refuse what a function made that has no head over the vocabulary."""
    logits = getattr(output, "logits", None)
    has_each = logits is not None and logits.dim() == 3 and logits.shape[1] == TOKENS
    if model.factory is None or has_each:
        return
    found = "no logits" if logits is None else f"logits of {list(logits.shape)}"
    raise TrainctlError(
        f"model.factory={model.factory}: {type(built).__name__} gives {found} for {TOKENS} tokens",
        hint="return a transformers PreTrainedModel with a language-modelling head",
    )


def _run(built: PreTrainedModel, seen: ForwardNotes) -> Any:
    """Return one forward pass."""
    for module in _experts(built):
        module.register_forward_pre_hook(seen.choose)
    one_of_each_kind(built)
    return built(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)


def _build(model: ModelConfig, config: PretrainedConfig, attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        config,
        dtype=torch.bfloat16,  # torch has shapes of a grouped product for it alone
        attn_implementation=attention,
        trust_remote_code=model.trust_remote_code,
    )


def structure(
    built: PreTrainedModel, model: ModelConfig, seen: ForwardNotes | None = None
) -> Anatomy:
    """What a model that has been built is made of.

    Args:
        built: The model, on whatever device.
        model: Where it is from.
        seen: What a forward pass did; where none has been its settings say it.

    Raises:
        TrainctlError: Nothing tells its blocks, or how many experts a token goes to.
    """
    return _Reader(built, model, seen or ForwardNotes()).anatomy()


def _refuse(model: ModelConfig, config: PretrainedConfig) -> None:
    what = f"{model.path}/config.json: {config.model_type}"
    if config.is_encoder_decoder:
        raise TrainctlError(
            f"{what} is an encoder with a decoder, and no causal language model",
            hint="a decoder: an architecture with a class ...ForCausalLM",
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not model.trust_remote_code:
        raise TrainctlError(
            f"{what} has no causal language model in transformers",
            hint=way_out(model) if has_own_code(model) else "an architecture with one",
        )


def _refuse_both_ways(model: ModelConfig, config: PretrainedConfig, seen: ForwardNotes) -> None:
    """Refuse an encoder: its tokens see those that they are to predict."""
    causal = [getattr(module, "is_causal", None) for module in seen.attention]
    if causal and all(each is False for each in causal):
        raise TrainctlError(
            f"{model.path}/config.json: {config.model_type} attends to later tokens too, and is no "
            "causal language model",
            hint='a decoder; "is_decoder": true in config.json makes one of a BERT',
        )


class _Reader:
    """Reads a model that has been built on fake tensors."""

    def __init__(self, built: PreTrainedModel, model: ModelConfig, seen: ForwardNotes) -> None:
        self._built, self._model, self._seen = built, model, seen
        self._modules = {module: name for name, module in built.named_modules()}
        self._blocks = decoder_blocks(built)
        self._experts = {self._modules[module]: module for module in _experts(built)}
        self._head = built.get_output_embeddings() or self._last_over_vocabulary()

    def _last_over_vocabulary(self) -> nn.Module | None:
        """Return the head of a class that names none: the last linear layer with a row a token."""
        inside = {module for block in self._blocks for module in block.modules()}
        outside = [module for module in self._modules if module not in inside]
        rows = {m.num_embeddings for m in outside if isinstance(m, nn.Embedding)}
        heads = [m for m in outside if isinstance(m, nn.Linear) and m.out_features in rows]
        return heads[-1] if heads else None

    def anatomy(self) -> Anatomy:
        built = self._built
        names = {self._modules[block]: number for number, block in enumerate(self._blocks)}
        parameters = {tensor: name for name, tensor in built.named_parameters()}
        aliases = built.named_parameters(remove_duplicate=False)
        shares = shares_of(built)
        experts = set(self._experts.values())
        return Anatomy(
            parameters=tuple(
                Parameter(
                    name=name,
                    shape=tuple(tensor.shape),
                    role=self._role(name, tensor),
                    block=block_of(name, names),
                    shares=shares.get(name, 0),
                )
                for tensor, name in parameters.items()
            ),
            blocks=tuple(self._read_blocks()),
            ties=tuple(
                (name, parameters[tensor]) for name, tensor in aliases if name != parameters[tensor]
            ),
            buffers=tuple(
                SavedBuffer(name=name, shape=tuple(t.shape))
                for name, t in built.state_dict(keep_vars=True).items()
                if not isinstance(t, nn.Parameter)
            ),
            attentions=attentions(type(built)),
            is_recurrent=bool(built._is_stateful),
            turns_by_length=any(map(_turns_by_length, built.modules())),
            has_experts_apart=not experts <= set(expert_modules(built)),
            has_routers_apart=not experts <= {module for _, module in routers_of(built)},
        )

    def _read_blocks(self) -> Iterator[Block]:
        kinds = kinds_of(self._built)
        first = {kind: self._blocks[kinds.index(kind)] for kind in set(kinds)}
        noted = self._seen.attention
        unseen = () if noted else self._attention_by_settings()
        for number, block in enumerate(self._blocks):
            like = first[kinds[number]]
            inside = f"{self._modules[like]}."
            experts = [m for name, m in self._experts.items() if name.startswith(inside)]
            yield Block(
                name=self._modules[block],
                kind=kinds[number],
                experts=max(map(_count, experts), default=0),
                experts_per_token=max(map(self._chosen_of, experts), default=0),
                attention=tuple(noted[m] for m in like.modules() if m in noted) or unseen,
            )

    def _chosen_of(self, experts: nn.Module) -> int:
        if experts in self._seen.chosen:
            return self._seen.chosen[experts]
        parent = self._built.get_submodule(self._modules[experts].rpartition(".")[0])
        for module in parent.modules():
            for name in ("top_k", "num_experts_per_tok"):
                found = getattr(module, name, None)
                if isinstance(found, int):
                    return found
        raise TrainctlError(
            f"{self._modules[experts]} has experts, and nothing says how many a token goes to",
            hint=way_out(self._model),
        )

    def _attention_by_settings(self) -> tuple[Attention, ...]:
        """Of a class whose attention does not go through transformers' table: by its heads."""
        config = self._built.config
        heads = getattr(config, "num_attention_heads", None)
        if not heads or self._built._is_stateful:
            return ()
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return (Attention(heads, width, width, getattr(config, "sliding_window", None)),)

    def _role(self, name: str, tensor: nn.Parameter) -> Role:
        module_name, _, own = name.rpartition(".")
        module = self._built.get_submodule(module_name)
        inside = next((each for each in self._experts if name.startswith(f"{each}.")), None)
        if inside is not None:
            return Role.expert
        if isinstance(module, nn.Embedding):
            return Role.embedding
        if self._head is not None and tensor is self._head.weight:
            return Role.head
        if any(part in name for part in SHARED):
            return Role.shared
        beside = {each.rpartition(".")[0] for each in self._experts}
        if any(name.startswith(f"{p}.") and ROUTER.search(name[len(p) :]) for p in beside):
            return Role.router
        if "norm" in type(module).__name__.lower():
            return Role.norm
        return Role.bias if own.endswith("bias") else Role.weight


def _drawn_whole(built: PreTrainedModel) -> str:
    """Return the first parameter whose initial values cannot be drawn in parts; empty if none
    is."""
    try:
        initial_laws(built)
    except NotInParts as found:
        return found.name
    except Exception:  # of the model's own code: it may start from weights, or the rank says it
        return ""
    return ""


def _turns_by_length(module: nn.Module) -> bool:
    """Whether a rotary embedding is of a kind that looks at the largest position."""
    kinds = getattr(module, "rope_type", None)  # of some by the type of a layer
    return not {*(kinds.values() if isinstance(kinds, dict) else [kinds])}.isdisjoint(BY_LENGTH)


def kinds_of(built: PreTrainedModel) -> list[int]:
    """Return the kind of each block: equal for blocks that have equal tensors and settings."""
    known: dict[Hashable, int] = {}
    types = getattr(built.config, "layer_types", None) or ()
    return [
        known.setdefault((_signature(block), *types[number : number + 1]), len(known))
        for number, block in enumerate(decoder_blocks(built))
    ]


def _signature(block: nn.Module) -> Hashable:
    tensors = tuple((name, tuple(tensor.shape)) for name, tensor in block.named_parameters())
    settings = tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and not _is_number_of_block(key)
    )
    return tensors, settings


def _is_number_of_block(key: str) -> bool:
    return "idx" in key or "index" in key or key in ("layer_id", "layer_number")


def one_of_each_kind(built: PreTrainedModel) -> dict[nn.Module, int]:
    """Let only the first block of each kind do its work: the others hand on what they get.

    Returns:
        The blocks that work, and how many are of their kind.
    """
    kinds, found = kinds_of(built), decoder_blocks(built)
    first: dict[int, nn.Module] = {}
    results: dict[nn.Module, Any] = {}

    def remember(block: nn.Module, args: Any, output: Any) -> None:
        results[block] = output

    def hand_on(working: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden, like = args[0] if args else kwargs["hidden_states"], results[working]
        return (hidden, *like[1:]) if isinstance(like, tuple) else hidden

    for kind, block in zip(kinds, found, strict=True):
        working = first.setdefault(kind, block)
        if working is block:
            block.register_forward_hook(remember)
        else:
            block.forward = partial(hand_on, working)  # type: ignore[method-assign]
    return {block: kinds.count(kind) for kind, block in first.items()}


def _experts(built: nn.Module) -> list[nn.Module]:
    return [module for module in built.modules() if _count(module)]


def _count(module: nn.Module) -> int:
    """Experts of a module of experts; 0 of others."""
    if isinstance(module, nn.ModuleList):
        names = {type(child).__name__ for child in module}
        return len(module) if len(names) == 1 and "Expert" in names.pop() else 0
    count: int = getattr(module, "num_experts", 0)
    own = list(module.parameters(recurse=False))
    is_fused = bool(own) and all(t.dim() > 1 and t.shape[0] == count for t in own)
    return count if is_fused and "Experts" in type(module).__name__ else 0


def attentions(code: type[PreTrainedModel]) -> tuple[str, ...]:
    """What `model.attention` may be, of a class of transformers."""
    has = {
        AttentionKind.sdpa: code._supports_sdpa,
        AttentionKind.eager: True,
        AttentionKind.flash_attention_2: code._supports_flash_attn,
    }
    return tuple(kind.value for kind, is_there in has.items() if is_there)
