"""Maximal-update parametrisation (muP): factors on configured values that depend on the width.

Tensor Programs V (arXiv:2203.03466), table 8: the form whose output weights start, and learn, like
the embedding, so that the two may be tied; a multiplier on the logits does the rest. With m the
width divided by the base width, and everything unchanged at m = 1:

| tensors | initial deviation | Adam, AdamW, Lion | SGD | Muon |
|---|---|---|---|---|
| embeddings | 1 | 1 | m | 1 (by AdamW) |
| hidden matrices | 1 / sqrt(m) | 1 / m | 1 | 1 |
| output projection | 1 | 1 | m | 1 (by AdamW) |
| norms, biases | - | 1 | m | 1 (by AdamW) |

The logits are multiplied by 1 / m. Attention's scale becomes sqrt(d0) / d for heads of width d
where the base has d0: 1 / d, as section 4 requires, and 1 / sqrt(d) for heads of the same width.

Not in the table:

- Lion's step has the size of its learning rate, like Adam's, so it scales like Adam's.
- Muon's step is a matrix of spectral norm sqrt(rows / columns) times a constant of the shape's
  ratio, at every width. This is what arXiv:2310.17813 (condition 1) requires, with a factor of 1.
- A step shrinks a weight by learning rate x decay, which must not depend on the width. So the
  decay is multiplied by what the learning rate is divided by (arXiv:2405.13698).
- Every gradient shrinks by 1 / m, like the logits, and so does Adam's epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any

from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import ModelConfig, OptimizerConfig, RunConfig
from trainctl.errors import RunStateError
from trainctl.models.tensors import SCORE
from trainctl.options.model import families
from trainctl.options.optimizer import WidthRule, spec_of
from trainctl.plans.shapes import head_dim, key_value_heads


class TensorKind(Enum):
    """Kind of a tensor by the dimensions that grow with the model's width."""

    embedding = "embedding"
    hidden = "hidden"
    output = "output"
    vector = "vector"


def tensor_kind(name: str, shape: tuple[int, ...]) -> TensorKind:
    """Return the kind of a tensor.

    `name` is the canonical name in a family with a closed form. `shape` is the shape of the whole
    tensor. A tied output projection is an embedding.
    """
    if len(shape) < 2 or name.endswith("bias"):  # the biases of all experts are one tensor
        return TensorKind.vector
    heads, embeddings = _name_suffixes()
    if name.endswith(heads):
        return TensorKind.output
    return TensorKind.embedding if name.endswith(embeddings) else TensorKind.hidden


@cache
def _name_suffixes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the name suffixes of output projections, and of embeddings, in all families."""
    heads = {f"{name}.weight" for name in (SCORE, *(spec.head for spec in families()))}
    embeddings = {f"{module}.weight" for spec in families() for module in spec.embeddings}
    return tuple(sorted(heads)), tuple(sorted(embeddings))


def width_factor(model: ModelConfig) -> float:
    """Return m, the width divided by the base width; 1 without muP."""
    if not model.mup or model.mup_base_width is None:
        return 1.0
    return model.hidden_size / model.mup_base_width


def initial_factor(model: ModelConfig, kind: TensorKind) -> float:
    """Return the factor of `initializer_range`, the standard deviation of the initial values."""
    return width_factor(model) ** -0.5 if kind is TensorKind.hidden else 1.0


def output_multiplier(model: ModelConfig) -> float:
    """Return the factor of the logits."""
    return 1 / width_factor(model)


def attention_factor(model: ModelConfig) -> float:
    """Return the factor of the usual attention scale, 1 / sqrt(head_dim)."""
    if not model.mup or model.mup_base_head_dim is None:
        return 1.0
    return math.sqrt(model.mup_base_head_dim / head_dim(model))


def multipliers(model: ModelConfig) -> dict[str, float]:
    """Return the multipliers of logits and attention; both are 1 without muP."""
    return {"output": output_multiplier(model), "attention": attention_factor(model)}


def check_multipliers(model: ModelConfig, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a checkpoint trained with other multipliers than `model` has.

    A checkpoint has weights only: with other multipliers they compute another function.

    Raises:
        TrainctlError: The multipliers differ (exit code 5).
    """
    had = manifest.get("multipliers", {"output": 1.0, "attention": 1.0})
    if had != multipliers(model):
        raise RunStateError(
            f"{name} was trained with the logits multiplied by {had['output']:g} "
            f"and attention by {had['attention']:g}, and this configuration has "
            f"{output_multiplier(model):g} and {attention_factor(model):g}",
            hint="keep model.mup, model.mup_base_width and model.mup_base_head_dim as they were; "
            "`trainctl export` makes a model that needs none of them",
        )


def lr_factor(model: ModelConfig, optimizer: OptimizerConfig, kind: TensorKind) -> float:
    """Return the factor of a tensor's learning rate."""
    m = width_factor(model)
    rule = spec_of(optimizer).width_rule
    if rule is WidthRule.adam:
        return 1 / m if kind is TensorKind.hidden else 1.0
    if rule is WidthRule.sgd:
        return 1.0 if kind is TensorKind.hidden else m
    return 1.0


def decay_factor(model: ModelConfig, optimizer: OptimizerConfig, kind: TensorKind) -> float:
    """Return the factor of a tensor's weight decay, which keeps learning rate x decay constant."""
    return 1 / lr_factor(model, optimizer, kind)


def scaled_epsilon(config: RunConfig, value: float) -> float:
    """Return Adam's epsilon `value` divided by m, like the gradients."""
    return value / width_factor(config.model) if config.trains_itself else value


def base_heads(model: ModelConfig) -> tuple[float, float]:
    """Return the query and key-value heads of the base-width model; whole numbers if it exists.

    All widths scale together: the base-width model also has 1 / m of the feed-forward width.
    """
    width = head_dim(model)
    shrink = width_factor(model) * (model.mup_base_head_dim or width) / width
    return model.num_attention_heads / shrink, key_value_heads(model) / shrink


def derived_settings(config: RunConfig) -> Iterator[DerivedValue]:
    """Yield the values that muP derives for the model; learning rates are in the optimizer's
    groups.
    """
    model = config.model
    if not model.mup or not config.trains_itself:
        return
    m = width_factor(model)
    widths = f"model.hidden_size {model.hidden_size} / model.mup_base_width {model.mup_base_width}"
    sources = ("model.hidden_size", "model.mup_base_width")
    yield derived("mup.width_factor", m, *sources, why=f"m = {widths}")
    deviation, key = model.initializer_range, "model.initializer_range"
    why = f"of initial hidden matrices: {key} {deviation:g} / sqrt(m)"
    deviation *= initial_factor(model, TensorKind.hidden)
    yield derived("mup.hidden_deviation", deviation, key, why=why)
    yield derived("mup.output_multiplier", 1 / m, why="of the logits: 1 / m")
    if model.mup_base_head_dim is not None:
        key, width = "model.mup_base_head_dim", head_dim(model)
        why = f"sqrt({key} {model.mup_base_head_dim}) / head width {width}"
        scale = attention_factor(model) / math.sqrt(width)
        yield derived("mup.attention_scale", scale, key, why=why)
