"""Model: its architecture, its shape, and its adapter."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar

from trainctl.config.registry import load
from trainctl.config.schema.option import option

WIDEST = 10_000_000
"""Largest dimension: far above every model, and low enough that all arithmetic stays fast."""


class AttentionKind(Enum):
    """Attention implementations, by transformers' names."""

    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


class WeightsKind(Enum):
    """Origin of the weights of step 0."""

    auto = "auto"
    pretrained = "pretrained"
    random = "random"


@dataclass
class ModelConfig:
    """The decoder to train, described by its published shape, so that planning needs no torch."""

    units: ClassVar[str] = "model"
    former: ClassVar[tuple[str, ...]] = ("tensors",)  # removed keys in runs of older versions

    name: str = option("tiny-llama", "Name shown in plans, reports and exports.")
    family: str = option("llama", "Architecture.", units="model")
    model_type: str | None = option(
        None, "transformers' name of the architecture; read from config.json for family=hf."
    )
    path: str | None = option(
        None,
        "Local transformers directory with config.json, or a name on the Hugging Face hub; "
        "required for family=hf.",
        local=True,
    )
    weights: WeightsKind = option(
        WeightsKind.auto,
        "Weights of step 0: pretrained are those of model.path or model.initial_weights, random "
        "ones are drawn from training.seed, auto takes pretrained ones where there are any.",
    )
    initial_weights: str | None = option(
        None,
        "Directory of safetensors, or run, whose weights to start from; none is model.path where "
        "model.weights has it so.",
        local=True,
    )
    vocab_size: int = option(
        512, "Rows of the embedding.", unit="tokens", minimum=0, maximum=100_000_000
    )
    hidden_size: int = option(128, "Width of the residual stream.", minimum=0, maximum=WIDEST)
    intermediate_size: int = option(
        384, "Width of the feed-forward layer.", minimum=0, maximum=WIDEST
    )
    num_layers: int = option(4, "Decoder blocks.", minimum=0, maximum=10_000)
    num_attention_heads: int = option(4, "Query heads.", minimum=1, maximum=100_000)
    num_key_value_heads: int | None = option(
        None,
        "Key and value heads (grouped-query attention); none means one for each query head.",
        minimum=1,
        maximum=100_000,
    )
    head_dim: int | None = option(
        None,
        "Width of a head; none means hidden_size / num_attention_heads.",
        minimum=1,
        maximum=WIDEST,
    )
    max_position_embeddings: int = option(
        2048, "Longest sequence that the model is defined for.", unit="tokens", minimum=1
    )
    tie_word_embeddings: bool = option(False, "Output projection shares the embedding's weights.")
    rope_theta: float = option(10000.0, "Base of the rotary embedding.", above=0)
    norm_epsilon: float = option(1e-5, "Epsilon of the (RMS or layer) norms.", above=0)
    initializer_range: float = option(
        0.02, "Standard deviation of the initial weights.", above=0, maximum=1
    )
    sliding_window: int | None = option(
        None, "Attention window of mistral; none attends to everything.", unit="tokens", minimum=1
    )
    attention: AttentionKind = option(AttentionKind.sdpa, "Attention kernel.")
    mup: bool = option(
        False,
        "Maximal-update parametrisation (arXiv:2203.03466): the best learning rate stays that of "
        "mup_base_width.",
    )
    mup_base_width: int | None = option(
        None, "hidden_size of the model that the learning rate was tuned on.", minimum=1
    )
    mup_base_head_dim: int | None = option(
        None, "Its head_dim; none means the same as this model's.", minimum=1
    )
    num_experts: int | None = option(
        None, "Experts of a sparse block; read from config.json.", minimum=1, maximum=100_000
    )
    experts_per_token: int | None = option(
        None, "Experts that each token goes to; read from config.json.", minimum=1, maximum=100_000
    )
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of the balancing loss that config.json asks for; read there, where "
        "output_router_logits is true.",
        minimum=0,
    )
    anatomy: list[str] = option(
        [],
        "Tensors, blocks, experts and attention of a directory whose architecture has no closed "
        "form, or of factory's model, as their own code makes them; read, never typed.",
    )
    trust_remote_code: bool = option(False, "Let transformers run Python code found in model.path.")
    factory: str | None = option(
        None,
        "Your own function that makes the model, as module:function; it is given this section.",
    )

    @property
    def has_closed_form(self) -> bool:
        """Whether its tensors follow from its shape: a family of trainctl's."""
        return not self.is_directory and self.factory is None

    @property
    def is_directory(self) -> bool:
        """Whether a transformers directory defines it; the shape then only describes it."""
        said: bool = load("model", self.family).is_directory
        return said

    @property
    def is_unread(self) -> bool:
        """Whether its tensors are unknown, because its own code has not been read."""
        return not self.has_closed_form and not self.anatomy

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Keys of its family that not all families have."""
        shared = {item.name for item in fields(ModelConfig)}
        return tuple(item.name for item in fields(self) if item.name not in shared)


@dataclass
class AdapterConfig:
    """Weights added to a frozen model and trained in place of its own (arXiv:2106.09685)."""

    units: ClassVar[str] = "adapter"

    kind: str = option(
        "none",
        "What is added to linear layers, and trains alone; none trains the model's own weights.",
        units="adapter",
    )
