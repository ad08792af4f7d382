"""Model: its architecture, its shape, and its adapter."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar

from trainctl.config.registry import load_spec
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
    family: str = option("llama", "Model architecture.", units="model")
    model_type: str | None = option(
        None, "model_type of the architecture in transformers; read from config.json for family=hf."
    )
    path: str | None = option(
        None,
        "Local transformers directory with config.json, or a model name on the Hugging Face Hub; "
        "required for family=hf.",
        local=True,
    )
    weights: WeightsKind = option(
        WeightsKind.auto,
        "Initial weights: pretrained loads those of model.path or model.initial_weights, random "
        "draws them from training.seed, auto loads pretrained weights if there are any.",
    )
    initial_weights: str | None = option(
        None,
        "Directory of safetensors files, or run, to load the initial weights from; none is "
        "model.path, where model.weights says so.",
        local=True,
    )
    vocab_size: int = option(
        512,
        "Vocabulary size: rows of the embedding.",
        unit="tokens",
        minimum=0,
        maximum=100_000_000,
    )
    hidden_size: int = option(
        128, "Hidden size: width of the residual stream.", minimum=0, maximum=WIDEST
    )
    intermediate_size: int = option(
        384, "Hidden width of the feed-forward layers.", minimum=0, maximum=WIDEST
    )
    num_layers: int = option(4, "Number of decoder blocks.", minimum=0, maximum=10_000)
    num_attention_heads: int = option(4, "Number of query heads.", minimum=1, maximum=100_000)
    num_key_value_heads: int | None = option(
        None,
        "Number of key and value heads (grouped-query attention); none means one per query head.",
        minimum=1,
        maximum=100_000,
    )
    head_dim: int | None = option(
        None,
        "Dimension of an attention head; none means hidden_size / num_attention_heads.",
        minimum=1,
        maximum=WIDEST,
    )
    max_position_embeddings: int = option(
        2048, "Maximum sequence length that the model is defined for.", unit="tokens", minimum=1
    )
    tie_word_embeddings: bool = option(
        False, "Share the weights of the embedding with the output projection."
    )
    rope_theta: float = option(10000.0, "Base of the rotary position embedding.", above=0)
    norm_epsilon: float = option(1e-5, "Epsilon of the RMS or layer norms.", above=0)
    initializer_range: float = option(
        0.02, "Standard deviation of the initial weights.", above=0, maximum=1
    )
    sliding_window: int | None = option(
        None,
        "Size of mistral's attention window; none attends to all previous tokens.",
        unit="tokens",
        minimum=1,
    )
    attention: AttentionKind = option(AttentionKind.sdpa, "Attention kernel.")
    mup: bool = option(
        False,
        "Maximal update parametrization (arXiv:2203.03466): the optimal learning rate found at "
        "mup_base_width carries over to this width.",
    )
    mup_base_width: int | None = option(
        None, "hidden_size of the model that the learning rate was tuned on.", minimum=1
    )
    mup_base_head_dim: int | None = option(
        None,
        "head_dim of the model that the learning rate was tuned on; none means this model's "
        "head_dim.",
        minimum=1,
    )
    num_experts: int | None = option(
        None,
        "Number of experts per mixture-of-experts block; read from config.json.",
        minimum=1,
        maximum=100_000,
    )
    experts_per_token: int | None = option(
        None,
        "Number of experts that each token is routed to; read from config.json.",
        minimum=1,
        maximum=100_000,
    )
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of the load-balancing loss in config.json; read from there if "
        "output_router_logits is true.",
        minimum=0,
    )
    anatomy: list[str] = option(
        [],
        "Tensors, blocks, experts and attention measured on the model's own code, for "
        "architectures without a closed form and for factory; filled in by trainctl, never set "
        "by hand.",
    )
    score_outputs: int | None = option(
        None,
        "Number of outputs of the head `score`, which objectives such as reward and classify have "
        "in place of the output projection; filled in by trainctl, never set by hand.",
        left_out_if_empty=True,
    )
    future_blocks: int | None = option(
        None,
        "Number of blocks behind the last one that each predict a token further ahead "
        "(objective.kind=multi_token); filled in by trainctl, never set by hand.",
        left_out_if_empty=True,
    )
    trust_remote_code: bool = option(
        False, "Let transformers run the Python code found in model.path.", runs_code=True
    )
    factory: str | None = option(
        None,
        "Your own function that builds the model, as module:function; it receives this section.",
    )

    @property
    def has_closed_form(self) -> bool:
        """Whether its tensors follow from its shape: a family of trainctl's."""
        return not (self.is_directory or self.is_module) and self.factory is None

    @property
    def needs_trace(self) -> bool:
        """Whether its tensors and activations are read from its own code, in a child process."""
        return not self.has_closed_form and bool(self.path or self.factory)

    @property
    def is_directory(self) -> bool:
        """Whether a transformers directory defines it; the shape then only describes it."""
        said: bool = load_spec("model", self.family).is_directory
        return said

    @property
    def is_module(self) -> bool:
        """Whether `factory` returns a torch module that is not transformers'."""
        said: bool = load_spec("model", self.family).is_module
        return said

    @property
    def has_tied_head(self) -> bool:
        """Whether embedding and output projection are one tensor."""
        return self.tie_word_embeddings and self.score_outputs is None

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
        "Adapter that is added to linear layers and trained while the model is frozen; none "
        "trains the model's own weights.",
        units="adapter",
    )
