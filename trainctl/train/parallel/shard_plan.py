"""Tensor and pipeline cuts of a model, from its family or from transformers' own plans.

transformers states which matrices of a model are split by outputs and which by inputs
(`base_model_tp_plan`), and the order of its decoder's parts (`base_model_pp_plan`). Both are read
into the same regions that families have, so the code that cuts and communicates does not
distinguish them. `trainctl.options.architectures` lists the architectures that may be cut along
each axis: those that were tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainctl.errors import TrainctlError
from trainctl.models.hf_weights import output_layer
from trainctl.models.tensors import SCORE
from trainctl.options.model import Family, Region, family_of_type
from trainctl.plans.trainable import LORA_A, LORA_B

COLUMN, GATHERED = ("colwise", "packed_colwise"), ("colwise_gather_output", "colwise_rep")
ROW = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
PER_HEAD, EXPERTS = "replicated_with_grad_allreduce", "moe_tp_experts"
"""Supported names of transformers' tensor-parallel styles (distributed/tensor_parallel.py)."""

MULTIPLIERS = ("embedding_multiplier",)
"""Decoder attributes that scale the input embeddings; stages after the first must set them to 1."""


@dataclass(frozen=True, slots=True)
class TpPlanOverride:
    """Plan for an architecture whose plan in transformers is missing or wrong."""

    why: str
    tensor: Mapping[str, str] | None = None
    """Styles by name, in place of `base_model_tp_plan`."""
    pipeline: tuple[str, ...] | None = None
    """Parts of the decoder in order, in place of `base_model_pp_plan`."""


OWN: Mapping[str, TpPlanOverride] = MappingProxyType(
    {
        "olmoe": TpPlanOverride(
            "transformers has no order of stages for it, and its decoder is a Llama's",
            pipeline=("embed_tokens", "layers", "norm"),
        ),
        "gpt_oss": TpPlanOverride(
            "transformers has a plan of its experts for expert ranks alone",
            tensor={
                "layers.*.self_attn.q_proj": "colwise",
                "layers.*.self_attn.k_proj": "colwise",
                "layers.*.self_attn.v_proj": "colwise",
                "layers.*.self_attn.sinks": "colwise",
                "layers.*.self_attn.o_proj": "rowwise",
                # Gate and up columns alternate, so a part of the columns has as many of each.
                "layers.*.mlp.experts.gate_up_proj": "colwise",
                "layers.*.mlp.experts.gate_up_proj_bias": "colwise",
                "layers.*.mlp.experts.down_proj": "rowwise",
                "layers.*.mlp.experts": EXPERTS,
            },
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Names of the modules of a model, and the regions in which it is cut."""

    decoder: str
    """Name of the decoder, in the model with its head."""
    embedding: str
    """Name of the token embedding, in the decoder."""
    positions: str | None = None
    """Name of the learned position embedding, in the decoder, if there is one."""
    entry: tuple[str, ...] = ()
    """Names of other modules between embedding and blocks, which only the first stage has."""
    blocks: str
    """Name of the list of blocks, in the decoder."""
    final_norm: str
    """Name of the norm after the last block, in the decoder."""
    head: str
    """Name of the output projection, in the model."""
    regions: tuple[Region, ...] = field(default=())
    """Parts of a block that tensor ranks split. A block may lack some of them, such as experts."""

    @classmethod
    def of_family(cls, family: Family) -> ShardPlan:
        """Build the cut from the facts of a family."""
        return cls(
            decoder=family.decoder,
            embedding=family.embedding,
            positions=family.positions,
            blocks=family.blocks,
            final_norm=family.final_norm,
            head=family.head,
            regions=family.regions,
        )

    def vocabulary_head(self, model: PreTrainedModel) -> list[nn.Module]:
        """Return the output projection; empty for a model whose head has no row per token, which
        every tensor rank has whole.
        """
        head = getattr(model, self.head)
        return [] if head is getattr(model, SCORE, None) else [head]

    def check(self, model: PreTrainedModel, *, sequence_sharded_norms: bool) -> None:
        """Refuse a model that tensor ranks cannot split.

        Raises:
            TrainctlError: There is no plan, or norms cannot be sharded along the sequence as
                requested.
        """
        if not self.regions:
            raise _not_shardable_error(
                model, "transformers has no plan of its matrices for tensor ranks"
            )
        if not sequence_sharded_norms:
            return
        if any(region.is_experts for region in self.regions):
            raise _not_shardable_error(model, "its routers need the whole sequence")
        if len({region.module.split(".")[0] for region in self.regions}) < 2:
            raise _not_shardable_error(
                model, "attention or feed-forward layers need the whole sequence"
            )


def shard_plan_of(model: PreTrainedModel) -> ShardPlan:
    """Return the cut of a whole skeleton.

    Raises:
        TrainctlError: The model has no family here, and transformers' plans are missing or not
            understood.
    """
    family = family_of_type(model.config.model_type)
    if family is None:
        return from_plans(model)
    head = SCORE if hasattr(model, SCORE) else family.head
    return replace(ShardPlan.of_family(family), head=head)


def tensor_parallel_shares(model: PreTrainedModel) -> dict[str, int]:
    """Return the number of equal units that tensor ranks divide, by canonical parameter name.

    Units are attention heads, columns of a feed-forward layer or of each expert, or tokens of
    the vocabulary. Parameters that every rank holds whole are left out. A model that cannot be
    cut has no entries.
    """
    try:
        where = shard_plan_of(model)
    except TrainctlError:
        return {}
    decoder = getattr(model, where.decoder)
    shares: dict[nn.Parameter, int] = {}
    for owner in (getattr(decoder, where.embedding), *where.vocabulary_head(model)):
        shares |= dict.fromkeys(owner.parameters(), model.config.vocab_size)
    for block in getattr(decoder, where.blocks):
        for region in where.regions:
            if has_parts(block, region.module, (*region.columns, region.row)):
                module = block.get_submodule(region.module)
                shares |= _units_by_parameter(module, region, model.config.num_attention_heads)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: count for parameter, count in shares.items()} if where.regions else {}


def _units_by_parameter(module: Any, region: Region, heads: int) -> dict[nn.Parameter, int]:
    """Return the number of units of each parameter in one region."""
    row = getattr(module, region.row)
    if region.is_experts:
        width = row.shape[1 if getattr(module, "is_transposed", False) else 2]
        return {getattr(module, name): width for name in (*region.columns, region.row)}
    matrix = row.weight
    width = matrix.shape[0 if isinstance(row, Conv1D) else 1]
    units = heads if hasattr(module, "is_causal") else width  # attention is cut by heads
    found = {matrix: units} | {getattr(module, name): units for name in region.values}
    for name in region.columns:
        layer = getattr(module, name)
        own = units
        if hasattr(module, "num_key_value_groups") and len(region.columns) == 3:
            own = layer.out_features * heads // width
        elif region.is_uneven:
            own = heads // module.num_key_value_groups
        found |= dict.fromkeys(layer.parameters(), own)
    return found


def from_plans(model: PreTrainedModel) -> ShardPlan:
    """Build the cut from transformers' plans, and from the module tree where the plans are silent.

    Raises:
        TrainctlError: The plans are missing or not understood.
    """
    config, own = model.config, OWN.get(model.config.model_type)
    order = own.pipeline if own and own.pipeline else tuple(config.base_model_pp_plan or ())
    styles = own.tensor if own and own.tensor else config.base_model_tp_plan or {}
    decoder = model.base_model
    parts = {name: getattr(decoder, name, None) for name in order}
    blocks = _require_single(
        model, (n for n, part in parts.items() if isinstance(part, nn.ModuleList))
    )
    before, after = order[: order.index(blocks)], order[order.index(blocks) + 1 :]
    looked_up = model.get_input_embeddings()
    embedding = _require_single(model, (name for name in before if parts[name] is looked_up))
    return ShardPlan(
        decoder=model.base_model_prefix,
        embedding=embedding,
        entry=tuple(name for name in before if name != embedding),
        blocks=blocks,
        final_norm=_require_single(model, iter(after)),
        head=_require_single(
            model, (name for name, child in model.named_children() if child is output_layer(model))
        ),
        regions=_find_regions(model, getattr(decoder, blocks), f"{blocks}.*.", styles),
    )


def _find_regions(
    model: PreTrainedModel, blocks: nn.ModuleList, prefix: str, styles: Mapping[str, str]
) -> tuple[Region, ...]:
    by_module: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        if style == EXPERTS:
            continue
        module, _, leaf = name.removeprefix(prefix).rpartition(".")
        if not name.startswith(prefix) or not module:
            raise _not_shardable_error(
                model, f"its plan cuts {name}, outside of the blocks' modules"
            )
        by_module.setdefault(module, {})[leaf] = style
    found = []
    for module, parts in by_module.items():
        block = next((block for block in blocks if has_parts(block, module, parts)), None)
        if block is not None:
            found.append(_make_region(model, module, block.get_submodule(module), parts))
    return tuple(found)


def has_parts(block: nn.Module, module: str, parts: Mapping[str, str] | tuple[str, ...]) -> bool:
    """Return True if a block has a region's module with all parts that are cut in it."""
    for name in module.split("."):
        if not hasattr(block, name):
            return False
        block = getattr(block, name)
    return all(getattr(block, part, None) is not None for part in parts)


def _make_region(
    model: PreTrainedModel, path: str, module: nn.Module, parts: Mapping[str, str]
) -> Region:
    """Return the region that a module's styles describe, given its shapes."""
    row = _require_single(model, (name for name, style in parts.items() if style in ROW))
    is_experts = isinstance(getattr(module, row), nn.Parameter)
    cut = [name for name, style in parts.items() if style in COLUMN + GATHERED]
    values = (
        () if is_experts else tuple(n for n in cut if isinstance(getattr(module, n), nn.Parameter))
    )
    columns = tuple(name for name in cut if name not in values)
    per_head = tuple(name for name, style in parts.items() if style == PER_HEAD)
    strange = set(parts) - {*cut, row, *per_head}
    if strange or not columns:
        what = ", ".join(f"{path}.{name}: {parts[name]}" for name in sorted(strange)) or path
        raise _not_shardable_error(model, f"its plan has styles that are not known here ({what})")
    known = {*cut, row, *per_head}
    if is_experts:
        added = {f"{name}_{tensor}" for name in known for tensor in (LORA_A, LORA_B)}
        _require_known_styles(model, path, module, known | added | {f"{row}_bias"})
        fused = 2 if parts[columns[0]] == "packed_colwise" else 1
        return Region(path, columns, row, fused=fused, is_experts=True)
    across: tuple[str, ...] = ()
    fused, is_uneven = 1, False
    gathers = any(parts[name] in GATHERED for name in columns)
    if gathers and len(columns) > 1:
        widths = {getattr(module, name).out_features for name in columns}
        across = tuple(
            name
            for name, child in module.named_children()
            if name not in known and {p.numel() for p in child.parameters()} & widths
        )
    elif gathers:
        width = getattr(module, columns[0]).out_features
        fused, rest = divmod(width, getattr(module, row).in_features)
        is_uneven = getattr(module, "num_key_value_groups", 1) != 1
        if rest and not is_uneven:
            raise _not_shardable_error(model, f"{path}.{columns[0]} has unequal parts")
        fused = 1 if is_uneven else fused
    _require_known_styles(model, path, module, known | set(across))
    return Region(
        path,
        columns,
        row,
        fused=fused,
        per_head=per_head,
        across_heads=across,
        values=values,
        is_uneven=is_uneven,
    )


def _require_known_styles(
    model: PreTrainedModel, path: str, module: nn.Module, known: set[str]
) -> None:
    """Refuse a region with a parameter that the plan does not mention."""
    for name, _ in module.named_parameters():
        if name.split(".")[0] not in known:
            raise _not_shardable_error(model, f"its plan does not say how {path}.{name} is cut")


def _require_single(model: PreTrainedModel, found: object) -> str:
    names = list(found)  # type: ignore[call-overload]
    if len(names) != 1:
        raise _not_shardable_error(
            model, "transformers does not say in which order its parts follow"
        )
    return names[0]


def _not_shardable_error(model: PreTrainedModel, why: str) -> TrainctlError:
    return TrainctlError(f"{model.config.model_type} cannot be cut: {why}", hint="parallelism=data")
