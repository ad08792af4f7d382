"""The anatomy of a transformers model, from its class and configuration, without weights.

The model is built on fake tensors, which have shapes and no values, and runs one forward pass over
two tokens. Its attention function only records the shapes of its inputs. So every architecture
whose attention goes through transformers' `AttentionInterface` is counted by what it multiplies,
whatever its name.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AttentionInterface,
    PretrainedConfig,
)
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import AttentionKind, ModelConfig, RunConfig
from trainctl.data.user_functions import user_code_digest
from trainctl.engines import patch_checks as declared
from trainctl.engines.patches import ProcessKind
from trainctl.errors import TrainctlError
from trainctl.models.anatomy import (
    Anatomy,
    Attention,
    Block,
    Parameter,
    Role,
    SavedBuffer,
    block_of,
    shape_from_anatomy,
)
from trainctl.models.directory import ENCODERS
from trainctl.models.hf_weights import output_layer
from trainctl.models.tensors import SCORE
from trainctl.train.models.documents import joined_attentions
from trainctl.train.models.encoders import is_encoder
from trainctl.train.models.model import (
    blocks,
    class_name,
    factory_model,
    failure_hint,
    failures_in_words,
    has_own_code,
    require_all_to_train,
    skeleton,
    transformers_config,
    transformers_model,
)
from trainctl.train.models.module import ModuleModel, largest_list, require_first_argument
from trainctl.train.models.module_layouts import module_layouts
from trainctl.train.models.weights import NonShardableInit, parameter_initializers
from trainctl.train.parallel.experts import expert_modules, routers_of
from trainctl.train.parallel.shard_plan import tensor_parallel_shares

BY_LENGTH = ("dynamic", "longrope")
"""Rotary embedding types whose frequencies depend on the sequence length (`dynamic_rope_update` in
transformers' modeling_rope_utils.py).
"""

TOKENS = 2
"""Length of the forward pass. Two, since a sliding window or a chunk of one token takes another
code path.
"""

COUNTED = "trainctl_counted"
"""Name under which the recording attention is registered in transformers' `AttentionInterface`."""

ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop")
"""Names of the dropout of attention in configurations of transformers."""

SHARED = ("shared_expert", "shared_mlp")
ROUTER = re.compile(r"(?:^|\.)(?:gate|router)(?:\.|$)")
"""Name parts of the modules beside routed experts: shared experts and routers."""


def anatomy(model: ModelConfig) -> Anatomy:
    """Return the anatomy of the model in a directory, or of the one that `model.factory` makes.

    Raises:
        TrainctlError: The model is no decoder, or its code cannot build or run it.
    """
    declared.require_definitions(RunConfig(model=model), {ProcessKind.trace})
    if model.factory is None:
        return _read_anatomy(model)
    found = _read_anatomy(model)
    if model.is_module:
        with failures_in_words(model, "built"):
            started = skeleton(model, torch.bfloat16)
            unsharded = _non_shardable_parameter(started, is_module=True)
        return replace(found, unsharded_init=unsharded, code=user_code_digest())
    # Ranks call the function with the sizes of the model it made; that must give the same model.
    table = found.to_table()
    again = replace(model, **shape_from_anatomy(table))
    if again != model and _read_anatomy(again).to_table() != table:
        raise TrainctlError(
            f"model.factory={model.factory} makes another model when it is given the sizes of the "
            "one that it made",
            hint="take the sizes from the section as they are (shape.hidden_size), or not at all",
        )
    return replace(found, code=user_code_digest())


LENGTHS = (16, 32)
"""Sequence lengths at which torch counts a module's operations: few tokens, for loops over them."""

ASKED_LENGTHS = tuple(1 << power for power in range(6, 21))
"""Sequence lengths at which a module's own `flops_per_token` is called."""


def _module_anatomy(built: ModuleModel, model: ModelConfig) -> Anatomy:
    """Return the anatomy of a module on fake tensors, with what its own code says."""
    require_all_to_train(built)
    require_first_argument(built.own_blocks())
    output = built(input_ids=torch.zeros(1, TOKENS, dtype=torch.long))
    _require_logits(built, model, output)
    undecayed = set(built.no_decay())
    shares, unsplit = module_layouts(partial(factory_model, model, torch.bfloat16))
    found = anatomy_of_built(built, model)
    if not {Role.head, Role.embedding} & {each.role for each in found.parameters}:
        raise TrainctlError(
            f"model.factory={model.factory}: {type(built.module).__name__} has neither an "
            "nn.Embedding nor an nn.Linear outside its blocks with one row for each token",
            hint="let one of both hold the vocabulary, by which its size is known",
        )
    return replace(
        found,
        parameters=tuple(
            replace(each, is_undecayed=each.name in undecayed, shares=shares.get(each.name, 0))
            for each in found.parameters
        ),
        flops=_own_flops(built),
        masks_documents=built.masks_documents,
        unsplit=tuple(unsplit.items()),
        unsharded_init="",
    )


def _own_flops(built: ModuleModel) -> tuple[tuple[int, int], ...]:
    """Return operations per token of forward and backward pass, by sequence length."""
    asked = [(length, built.flops_per_token(length)) for length in ASKED_LENGTHS]
    points = [(length, round(count)) for length, count in asked if count is not None]
    if not points:
        points = [(length, round(_counted_flops(built, length))) for length in LENGTHS]
    kept = points[:1]
    for here, after in pairwise(points[1:]):
        (n, low), (m, mid), (k, high) = kept[-1], here, after
        if abs(mid - (low + (high - low) * (m - n) / (k - n))) > 0.5:
            kept.append(here)
    return (*kept, points[-1])


def _counted_flops(built: ModuleModel, length: int) -> float:
    """Return three times the operations of a forward pass per token, as torch counts products."""
    # The counter knows products of matrices, and not every attention kernel of a CPU.
    plain = sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), plain:
        built(input_ids=torch.zeros(1, length, dtype=torch.long))
    return 3 * counter.get_total_flops() / length


def _read_anatomy(model: ModelConfig) -> Anatomy:
    seen = ForwardProbe()
    AttentionInterface.register(COUNTED, seen.attend)
    own: tuple[str, ...] = ()  # attention that the user's function has chosen
    with FakeTensorMode(allow_non_fake_inputs=True), failures_in_words(model, "built"):
        if model.factory is not None:
            built = factory_model(model, torch.bfloat16)
            if not isinstance(built, ModuleModel):
                own = (built.config._attn_implementation or AttentionKind.eager.value,)
                built.config._attn_implementation = COUNTED
        else:
            config = transformers_config(model)
            _refuse_other_tasks(model, config)
            # torch computes fake shapes of a grouped product for bf16 only.
            build = partial(transformers_model, model, config, torch.bfloat16)
            try:
                built = build(COUNTED)
            except KeyError:  # older classes have a table of attentions of their own
                built = build(AttentionKind.eager.value)
        require_blocks(built, model)
        if model.score_outputs is not None and output_layer(built) is not getattr(built, SCORE, 0):
            raise TrainctlError(
                f"{type(built).__name__} has no linear layer `{SCORE}`, which the objective trains",
                hint="a decoder, such as a llama or a qwen3",
            )
        built.tie_weights()
        built.train()
        if isinstance(built, ModuleModel):
            return _module_anatomy(built, model)
        _require_logits(built, model, _run_forward(built, seen))
        _refuse_bidirectional_attention(model, built.config, seen)
        kinds = block_kinds(built)
        found = replace(
            anatomy_of_built(built, model, seen), unsharded_init=_non_shardable_parameter(built)
        )
    # Values decide it, which fake tensors lack.
    kinds_end = max(kinds.index(kind) for kind in kinds) + 1
    joined = joined_attentions(built, own or found.attentions, kinds_end)
    if own and joined:
        joined = tuple(kind.value for kind in AttentionKind)
    return replace(found, joined_attentions=joined)


@dataclass(frozen=True, slots=True)
class ForwardProbe:
    """Attention shapes and expert counts recorded during a forward pass."""

    attention: dict[nn.Module, Attention] = field(default_factory=dict)
    """Heads and head sizes of each attention call, by the module that made it."""
    chosen: dict[nn.Module, int] = field(default_factory=dict)
    """Number of experts per token (top-k), by the module that holds the experts."""

    def attend(
        self, module: nn.Module, query: Any, key: Any, value: Any, *_: Any, **settings: Any
    ) -> Any:
        """Record the shapes of an attention call; return an empty output of its shape."""
        window = settings.get("sliding_window")
        if window and not getattr(module, "is_causal", True):  # as far to both sides
            window = 2 * window - 1
        found = Attention(query.shape[1], query.shape[-1], value.shape[-1], window)
        self.attention[module] = found
        batch, heads, tokens, _ = query.shape
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None

    def choose(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the top-k of a module of experts (a forward pre-hook).

        The second argument of transformers' experts holds the indices of the chosen experts,
        (tokens, top-k).
        """
        if len(args) > 1:
            self.chosen[module] = args[1].shape[-1]


def require_blocks(built: PreTrainedModel, model: ModelConfig) -> None:
    """Raise TrainctlError if the model's decoder blocks cannot be found."""
    if not decoder_blocks(built):
        if isinstance(built, ModuleModel):
            raise TrainctlError(
                f"model.factory={model.factory}: {type(built.module).__name__} has no blocks",
                hint="hold them in an nn.ModuleList, or give them by blocks()",
            )
        raise TrainctlError(
            f"{type(built).__name__} has no decoder blocks that transformers knows of",
            hint=failure_hint(model),
        )


def decoder_blocks(built: nn.Module) -> list[nn.Module]:
    """Return the decoder blocks: the modules that transformers marks as such
    (`GradientCheckpointingLayer`), else the children of the `ModuleList` with the most parameters.
    """
    return list(blocks(built)) or largest_list(built)


def _require_logits(built: PreTrainedModel, model: ModelConfig, output: Any) -> None:
    """Refuse a model of `model.factory` whose output has no logits of every token."""
    logits = getattr(output, "logits", None)
    has_each = logits is not None and logits.dim() == 3 and logits.shape[1] == TOKENS
    if model.factory is None or has_each:
        return
    found = "no logits" if logits is None else f"logits of {list(logits.shape)}"
    raise TrainctlError(
        f"model.factory={model.factory}: {class_name(built)} gives {found} for {TOKENS} tokens",
        hint="give the logits of every token, (samples, length, vocabulary)"
        if model.is_module
        else "return a transformers PreTrainedModel with a language-modelling head",
    )


def _run_forward(built: PreTrainedModel, seen: ForwardProbe) -> Any:
    """Run one forward pass and return its output."""
    for module in _expert_modules(built):
        module.register_forward_pre_hook(seen.choose)
    skip_duplicate_blocks(built)
    return built(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)


def anatomy_of_built(
    built: PreTrainedModel, model: ModelConfig, seen: ForwardProbe | None = None
) -> Anatomy:
    """Return the anatomy of a model that has been built.

    Args:
        built: The model, on any device.
        seen: Records of a forward pass. Without one, attention and top-k are read from the
            configuration.

    Raises:
        TrainctlError: Its blocks cannot be found, or nothing says how many experts a token goes to.
    """
    return _Reader(built, model, seen or ForwardProbe()).anatomy()


def _refuse_other_tasks(model: ModelConfig, config: PretrainedConfig) -> None:
    what = f"{model.path}/config.json: {config.model_type}"
    if config.is_encoder_decoder:
        raise TrainctlError(
            f"{what} is an encoder with a decoder, and no causal language model",
            hint="a decoder: an architecture with a class ...ForCausalLM",
        )
    is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or config.model_type in ENCODERS
    if not is_known and not model.trust_remote_code:
        raise TrainctlError(
            f"{what} has no causal language model in transformers",
            hint=failure_hint(model) if has_own_code(model) else "an architecture with one",
        )
    has_class = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if model.score_outputs is not None and not (has_class or model.trust_remote_code):
        raise TrainctlError(
            f"{what} has no class ...ForSequenceClassification in transformers, whose head the "
            "objective trains",
            hint="an architecture with one, such as llama or qwen3",
        )


def _refuse_bidirectional_attention(
    model: ModelConfig, config: PretrainedConfig, seen: ForwardProbe
) -> None:
    """Refuse an encoder that was not shown to train on masked tokens."""
    causal = [getattr(module, "is_causal", None) for module in seen.attention]
    if causal and all(each is False for each in causal) and not is_encoder(config):
        what = f"{model.path}/config.json" if model.is_directory else model.factory
        raise TrainctlError(
            f"{what}: {config.model_type} attends to later tokens too, and is no causal language "
            "model",
            hint=f"a decoder, or an encoder of {', '.join(ENCODERS)}",
        )


class _Reader:
    """Builds the anatomy of one model; `_read_anatomy` gives it models on fake tensors."""

    def __init__(self, built: PreTrainedModel, model: ModelConfig, seen: ForwardProbe) -> None:
        self._built, self._model, self._seen = built, model, seen
        self._modules = {module: name for name, module in built.named_modules()}
        self._blocks = decoder_blocks(built)
        self._experts = {self._modules[module]: module for module in _expert_modules(built)}
        self._head = output_layer(built) or self._last_over_vocabulary()

    def _last_over_vocabulary(self) -> nn.Module | None:
        """Return the last linear layer outside the blocks with one row per token, if there is one:
        the head of a class whose `get_output_embeddings` returns none.
        """
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
        shares = tensor_parallel_shares(built)
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
            attentions=supported_attentions(type(built)),
            is_recurrent=bool(built._is_stateful),
            is_encoder=is_encoder(built.config),
            has_length_dependent_rope=any(map(_rope_depends_on_length, built.modules())),
            drops_attention=any(getattr(built.config, name, 0) for name in ATTENTION_DROPOUT),
            has_custom_expert_forward=not experts <= set(expert_modules(built)),
            has_unknown_routers=not experts <= {module for _, module in routers_of(built)},
            has_inputs_first_experts=any(getattr(m, "is_transposed", False) for m in experts),
        )

    def _read_blocks(self) -> Iterator[Block]:
        kinds = block_kinds(self._built)
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
                experts=max(map(_expert_count, experts), default=0),
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
            hint=failure_hint(self._model),
        )

    def _attention_by_settings(self) -> tuple[Attention, ...]:
        """Return the attention that the configuration describes, for a class that does not use
        `AttentionInterface`; empty for a recurrent model.
        """
        config = self._built.config
        heads = getattr(config, "num_attention_heads", None)
        if not heads or self._built._is_stateful or isinstance(self._built, ModuleModel):
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


def _non_shardable_parameter(built: PreTrainedModel, *, is_module: bool = False) -> str:
    """Return the first parameter that cannot be drawn in parts, or an empty string."""
    try:
        parameter_initializers(built)
    except NonShardableInit as found:
        return found.name
    except Exception:  # the run may start from weights; else its rank reports this
        if is_module:
            raise
        return ""
    return ""


def _rope_depends_on_length(module: nn.Module) -> bool:
    """Whether the module is a rotary embedding that depends on the sequence length."""
    kinds = getattr(module, "rope_type", None)  # some modules have one per layer type
    return not {*(kinds.values() if isinstance(kinds, dict) else [kinds])}.isdisjoint(BY_LENGTH)


def block_kinds(built: PreTrainedModel) -> list[int]:
    """Return each block's kind; blocks with equal tensor shapes and settings share one."""
    known: dict[Hashable, int] = {}
    types = getattr(built.config, "layer_types", None) or ()
    return [
        known.setdefault((_block_signature(block), *types[number : number + 1]), len(known))
        for number, block in enumerate(decoder_blocks(built))
    ]


def _block_signature(block: nn.Module) -> Hashable:
    tensors = tuple((name, tuple(tensor.shape)) for name, tensor in block.named_parameters())
    code = type(block).__qualname__
    settings = tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and not _is_number_of_block(key)
    )
    return code, tensors, settings


def _is_number_of_block(key: str) -> bool:
    return "idx" in key or "index" in key or key in ("layer_id", "layer_number")


def skip_duplicate_blocks(built: PreTrainedModel) -> dict[nn.Module, int]:
    """Let only the first block of each kind compute. The other blocks pass their input on.

    Returns:
        The blocks that compute, each with the number of blocks of its kind.
    """
    kinds, found = block_kinds(built), decoder_blocks(built)
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


def _expert_modules(built: nn.Module) -> list[nn.Module]:
    if isinstance(built, ModuleModel):
        return []  # experts of a form of its own, which nothing here splits or balances
    return [module for module in built.modules() if _expert_count(module)]


def _expert_count(module: nn.Module) -> int:
    """Return the number of experts in a module of experts; 0 for any other module."""
    if isinstance(module, nn.ModuleList):
        names = {type(child).__name__ for child in module}
        return len(module) if len(names) == 1 and "Expert" in names.pop() else 0
    count: int = getattr(module, "num_experts", 0)
    own = list(module.parameters(recurse=False))
    is_fused = bool(own) and all(t.dim() > 1 and t.shape[0] == count for t in own)
    return count if is_fused and "Experts" in type(module).__name__ else 0


def supported_attentions(code: type[PreTrainedModel]) -> tuple[str, ...]:
    """Return the values of `model.attention` that a transformers class supports."""
    has = {
        AttentionKind.sdpa: code._supports_sdpa,
        AttentionKind.eager: True,
        AttentionKind.flash_attention_2: code._supports_flash_attn,
    }
    return tuple(kind.value for kind, is_there in has.items() if is_there)
