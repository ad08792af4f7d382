"""Decoder of a row, and its tensors.

The columns give its sizes. Whether it has a gate and tied embeddings follows from its name, or from
the choice that comes closest to the stated number of parameters.
"""

from __future__ import annotations

import re
from dataclasses import replace

from memory_rows import NotExpressible, Row
from memory_shapes import QUERY_WIDTHS, TIED

from trainctl.config.schema import ModelConfig
from trainctl.memory.stages import Piece, Stage, pipeline_stages

GATED = (
    "llama",
    "mistral",
    "ministral",
    "qwen",
    "gemma",
    "swiglu",
    "deepseek",
    "olmo",
    "yi-",
    "tinyllama",
    "phi-3",
    "phi-4",
    "vicuna",
    "codellama",
    "debug",
    "smollm",
    "granite",
    "internlm",
    "baichuan",
    "glm",
    "palm",
)


EXPERTS = re.compile(
    r"mixtral|moe|deepseek-?v[23]|dbrx|experts|\d+x\d+(\.\d+)?b|-a\d+(\.\d+)?b|gpt-?oss|grok|"
    r"llama-?4|scout|maverick|jamba|kimi|qwen3-next|deepseek-?r1(?!-distill)"
)
OTHERS = re.compile(
    r"\b(al)?bert|roberta|electra|\bt5\b|\bt5-|\bul2|\bbart\b|\bvit\b|\bvit-|mamba|rwkv|diffusion|"
    r"\bunet|\bflux|\bdit\b|whisper|wav2vec|llava|-vl\b|\bclip\b|resnet|swin|hyena|retnet"
)
"""Names of models that are not dense text decoders."""
LARGEST_DISAGREEMENT = 1.4
"""Largest relative difference between computed and stated parameters: «1B» may mean 1.24 billion,
and «2B» 2.5.
"""


def model_of(row: Row) -> ModelConfig:
    """Return the decoder of a row.

    Raises:
        NotExpressible: It is no decoder, its sizes are missing, or they contradict the stated
            number of parameters.
    """
    if EXPERTS.search(row.words("model")) or re.search("mixtral|moe|experts", row.words("id")):
        if not (row["world_gpus"] or row["dp"]):
            raise NotExpressible(
                "a mixture of experts whose states are divided over world_gpus, which is not given"
            )
        raise NotExpressible("a mixture of experts: the model table has dense models only")
    if OTHERS.search(row.words("model")):
        raise NotExpressible("not a decoder of text")
    if not row["heads"]:
        return _linear_model(row)
    text = row.words("model", "caveat")
    named = any(word in text for word in GATED)
    if "untie" in text or row["model"] == "SimpleTransformer":
        return _shape(row, gated=named, tied=False)
    tied = not named or bool(TIED.search(row.words("model")))
    stated = (row.quantity("params_b") or 0) * 1e9
    if not stated or "megatron" in row.words("framework"):
        return _shape(row, gated=named, tied=tied)
    # Settings that the name leaves open follow from the number of parameters.
    choices = [_shape(row, gated=named, tied=tied), _shape(row, gated=named, tied=not tied)]
    best = min(choices, key=lambda model: abs(count_of(row, model) / stated - 1))
    if abs(count_of(row, best) / stated - 1) < 0.05:
        return best
    choices += [_shape(row, gated=not named, tied=either) for either in (True, False)]
    best = min(choices, key=lambda model: abs(count_of(row, model) / stated - 1))
    ratio = count_of(row, best) / stated
    if not 1 / LARGEST_DISAGREEMENT < ratio < LARGEST_DISAGREEMENT:
        raise NotExpressible(
            f"the sizes give {count_of(row, best) / 1e9:.3g} billion parameters, the row"
            f" {stated / 1e9:.3g}"
        )
    return best


def count_of(row: Row, model: ModelConfig) -> int:
    return sum(stage.parameters for stage in stages_of(row, model, 1, ()))


def stages_of(
    row: Row, model: ModelConfig, tensor: int, stage_blocks: tuple[int, ...]
) -> tuple[Stage, ...]:
    """Return the pipeline's stages, also with the row's key and value heads in models without a
    gate.
    """
    held = pipeline_stages(model, tensor=tensor, stage_blocks=stage_blocks)
    hidden = model.hidden_size
    keys = row.number("kv_heads", 0) or model.num_attention_heads
    if model.family != "gpt2" or keys == model.num_attention_heads:
        return held
    packed = hidden + 2 * keys * (hidden // model.num_attention_heads)
    sizes = {
        -(-3 * hidden * hidden // tensor): -(-packed * hidden // tensor),
        -(-3 * hidden // tensor): -(-packed // tensor),
    }
    return tuple(
        replace(
            stage,
            pieces=tuple(
                replace(
                    piece,
                    numel=sizes.get(piece.numel, piece.numel) if piece.in_block else piece.numel,
                )
                for piece in stage.pieces
            ),
        )
        for stage in held
    )


def _shape(row: Row, *, gated: bool, tied: bool) -> ModelConfig:
    hidden, heads = row.size("hidden"), row.size("heads")
    ffn = row.number("ffn", 0)
    if not ffn:
        ffn = -(-8 * hidden // (3 * 256)) * 256 if gated else 4 * hidden
    name = row.words("model")
    is_qwen3 = gated and "qwen3" in name
    width = next((size for words, size in QUERY_WIDTHS if re.search(words, name)), None)
    if hidden % heads and width is None:
        raise NotExpressible(f"hidden {hidden} cannot be divided by {heads} heads")
    family = "qwen3" if is_qwen3 else "llama" if gated else "gpt2"
    return ModelConfig(
        name=row["model"],
        family=family,
        vocab_size=_padded_vocabulary(row),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=row.size("layers"),
        num_attention_heads=heads,
        num_key_value_heads=row.number("kv_heads", heads) or heads,
        head_dim=width if gated else None,
        max_position_embeddings=row.size("seq_len"),
        tie_word_embeddings=tied,
    )


def _linear_layers(row: Row) -> tuple[int, int]:
    """Return number and width of a stack of linear layers («linear-4x32768»).

    Raises:
        NotExpressible: The model is something else.
    """
    match = re.search(r"linear-(\d+)x(\d+)", row.words("model"))
    if not match:
        raise NotExpressible("no attention heads, so not a decoder")
    return int(match.group(1)), int(match.group(2))


def _linear_model(row: Row) -> ModelConfig:
    """Return a model without blocks that represents a stack of linear layers."""
    layers, width = _linear_layers(row)
    return ModelConfig(
        name=row["model"],
        num_layers=0,
        hidden_size=0,
        intermediate_size=width,
        vocab_size=layers,
        num_attention_heads=1,
    )


def linear_stage(row: Row) -> Stage:
    layers, width = _linear_layers(row)
    return Stage(
        index=0,
        blocks=0,
        has_embedding=False,
        has_head=False,
        embedding=0,
        head=0,
        pieces=(
            Piece(numel=width**2, count=layers, is_matrix=True, in_block=True, embedding=False),
            Piece(numel=width, count=layers, is_matrix=False, in_block=True, embedding=False),
        ),
    )


def _padded_vocabulary(row: Row) -> int:
    vocab = row.size("vocab")
    if "megatron" in row.words("framework"):
        multiple = 128 * max(1, row.number("tp", 1))
        return -(-vocab // multiple) * multiple
    return vocab
