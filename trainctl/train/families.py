"""What parallelism has to know of an architecture: the one place to add a family.

Names are transformers' own. A family that is not here trains data parallel only.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.errors import TrainctlError


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a block whose matrices are split over the tensor ranks (arXiv:1909.08053).

    Attributes:
        module: The module, in the block; its input enters the region.
        columns: Linear layers in it that are split by outputs.
        row: The one that is split by inputs; its output leaves the region.
        fused: Matrices that lie side by side in each of `columns`.
        per_head: Parameters in it that every rank has whole and uses for its own heads only.
        widths: Attributes of the module that hold a width and are divided.
    """

    module: str
    columns: tuple[str, ...]
    row: str
    fused: int = 1
    per_head: tuple[str, ...] = ()
    widths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """Where things are in a decoder.

    Attributes:
        decoder: The decoder in the model with its head.
        embedding: Token embedding, in the decoder.
        positions: Learned position embedding, in the decoder, if there is one.
        blocks: List of the blocks, in the decoder.
        final_norm: Norm after the last block, in the decoder.
        regions: Of a block.
        head: Output projection, in the model.
    """

    decoder: str
    embedding: str
    positions: str | None
    blocks: str
    final_norm: str
    regions: tuple[Region, ...]
    head: str = "lm_head"


def _gated(per_head: tuple[str, ...] = ()) -> Family:
    """A decoder with rotary positions and a gated feed-forward layer, as llama's."""
    return Family(
        decoder="model",
        embedding="embed_tokens",
        positions=None,
        blocks="layers",
        final_norm="norm",
        regions=(
            Region("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj", per_head=per_head),
            Region("mlp", ("gate_proj", "up_proj"), "down_proj"),
        ),
    )


FAMILIES = {
    "llama": _gated(),
    "mistral": _gated(),
    "qwen3": _gated(per_head=("q_norm", "k_norm")),
    "gpt2": Family(
        decoder="transformer",
        embedding="wte",
        positions="wpe",
        blocks="h",
        final_norm="ln_f",
        regions=(
            Region("attn", ("c_attn",), "c_proj", fused=3, widths=("split_size",)),
            Region("mlp", ("c_fc",), "c_proj"),
        ),
    ),
}
"""By transformers' `model_type`."""


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model.

    Raises:
        TrainctlError: It is not in the table.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        raise TrainctlError(
            f"tensor and pipeline parallelism do not know the {model.config.model_type} "
            f"architecture; they know {', '.join(sorted(FAMILIES))}",
            hint="parallelism=data",
        )
    return family


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's blocks."""
    family = family_of(model)
    found = getattr(getattr(model, family.decoder), family.blocks)
    assert isinstance(found, nn.ModuleList)
    return found
