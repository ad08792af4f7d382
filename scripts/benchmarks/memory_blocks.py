"""Activation memory of decoder blocks whose code differs from transformers', operation by
operation.

`trainctl.memory.activations` has the closed forms of the models that trainctl trains. Published
measurements include other models. Each is written here in the same terms, bytes per token and rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ModelConfig
from trainctl.memory.activations import BlockActivations
from trainctl.plans import shapes

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Description of a block's code as far as its memory depends on it. Counts are bytes per
    element of the named width.
    """

    norm: int
    """Bytes kept by one norm per element of the hidden states, including its output."""
    norm_statistics: int = FP32
    """Bytes kept by a norm for each token."""
    beside_norms: int = 0
    """Bytes kept per element of the hidden width in addition to the norms."""
    attention_copies: int = 0
    """Copies of the queries' width kept in addition to queries, keys, values and output."""
    dropout: bool = False
    """Whether two dropout masks of one byte per element are kept."""
    scores: int = 0
    """Bytes kept of each attention score; 0 for a fused kernel."""
    statistics: int = FP32
    """Bytes kept by attention for each head and token."""
    gated: bool = True
    """Whether the feed-forward layer has a gate."""
    inner: int = 4
    """Number of kept tensors of the feed-forward width."""
    sequence_parallel: bool = False
    """Whether activations replicated by tensor parallelism are split along the sequence."""
    fp32_softmax: bool = False
    """Whether probabilities are computed in fp32, then cast."""
    alternate: bool = False
    """Whether selective recomputation keeps only every other matrix product (torchtitan)."""
    compiled: bool = False
    """Whether a compiler drops the block's last product, which the backward pass does not need."""


def block(
    model: ModelConfig,
    code: Code,
    *,
    key_heads: int,
    sequence_length: int,
    element: int,
    tensor: int,
) -> BlockActivations:
    """Compute the activations of one block.

    Args:
        key_heads: Number of key and value heads.
        sequence_length: Keys per query; unfused scores grow with it.
        element: Bytes per element of the compute type.
        tensor: Tensor-parallel size.
    """
    hidden = model.hidden_size
    width = shapes.head_dim(model)
    queries = model.num_attention_heads * width / tensor
    keys = key_heads * width / tensor
    heads = model.num_attention_heads / tensor
    inner = model.intermediate_size / tensor
    whole = tensor if code.sequence_parallel else 1
    norms = 2 * (hidden * (code.norm + (1 if code.dropout else 0)) + code.norm_statistics) / whole
    norms += hidden * code.beside_norms / whole
    attention = (
        element * (2 * queries + 2 * keys + code.attention_copies * queries)
        + code.statistics * heads
    )
    scores = code.scores * heads * sequence_length
    # Two gradients of the scores, in the format that the softmax runs in.
    softmax = FP32 if code.fp32_softmax else element
    score_gradients = 2 * softmax if code.scores else 0
    # Results of products with weights and of attention, which selective recomputation keeps.
    up = 2 if code.gated else 1
    if code.alternate:
        last = 0 if code.compiled else hidden / whole
        products = element * (queries + keys + inner + last)
    else:
        products = element * (queries + 2 * keys + up * inner + 2 * hidden / whole)
    products += 0 if code.scores else element * queries + FP32 * heads
    return BlockActivations(
        norms=round(norms),
        attention=round(attention),
        scores=round(scores),
        feed_forward=round(element * code.inner * inner),
        boundary=round(element * hidden / whole),
        products=round(products),
        feed_forward_gradient=round(element * (2 * inner + 2 * hidden)),
        attention_gradient=round(
            element * (2 * queries + 2 * keys + 2 * hidden)
            + score_gradients * heads * sequence_length
        ),
    )


TORCH = Code(
    norm=4, norm_statistics=8, attention_copies=1, scores=2, statistics=0, gated=False, inner=2
)
"""torch.nn.LayerNorm and MultiheadAttention with `need_weights`: the packed projection is copied,
the queries scaled, and the probabilities kept once in the compute type."""

TORCH_AUTOCAST = Code(
    norm=6,
    norm_statistics=8,
    attention_copies=1,
    scores=6,
    statistics=0,
    fp32_softmax=True,
    gated=False,
    inner=2,
)
"""`TORCH` under autocast, which computes norms and the softmax in fp32. A norm keeps its input in
fp32 and its output cast for the product; probabilities are kept in fp32 and as cast.
"""

MEGATRON_UNFUSED = Code(
    norm=4, norm_statistics=8, dropout=True, scores=5, statistics=0, gated=False, inner=2
)
"""Megatron before fused attention: keeps probabilities, their dropout mask and the probabilities
after dropout (arXiv:2205.05198, section 4.1).
"""

PLAIN = Code(norm=4, inner=4)
"""A Llama in plain PyTorch with fused norms and attention: SwiGLU keeps both inputs, the result of
the activation and the product."""

PLAIN_FP32_NORM = Code(norm=10, inner=4)
"""`PLAIN` with a norm written out in fp32 (litgpt's): keeps its input and the scaled values in
fp32, and the result.
"""

PLAIN_GELU = Code(norm=4, norm_statistics=8, gated=False, inner=2)
"""A GPT in plain PyTorch: LayerNorm, fused attention and torch's GELU."""

COMPILED = Code(norm=2, inner=2, compiled=True)
"""A compiled Llama block: the compiler keeps results of products and recomputes norms and
activations, which is cheaper than reading them.
"""

COMPILED_GELU = Code(norm=2, norm_statistics=8, gated=False, inner=1, compiled=True)
"""`COMPILED` for a GPT with GELU."""

FROZEN = Code(norm=5, inner=3)
"""A Llama with frozen matrices (LoRA on queries and values). Products keep no input: of a norm's
output only an adapter's input stays, and the feed-forward layer keeps no product.
"""

FROZEN_GELU = Code(norm=2, norm_statistics=8, beside_norms=2, gated=False, inner=1)
"""`FROZEN` for a GPT: norms keep their inputs, GELU its input, an adapter the norm's output."""

LITGPT_LORA = Code(norm=4, beside_norms=3, attention_copies=4, inner=3)
"""litgpt's LoRA on queries and values of a Llama, whose norms run in fp32 and keep fp32 inputs.
The adapter's input went through dropout: a copy and its mask. Values are a view of the packed
projection, which stays whole (two more copies). `index_copy` keeps the adapter's output for
queries and values (two more copies; its derivative needs the source's shape and saves the
source).
"""

LITGPT_LORA_GELU = Code(
    norm=1, norm_statistics=8, beside_norms=3, attention_copies=4, gated=False, inner=1
)
"""`LITGPT_LORA` for its GPT-NeoX and Phi, whose two norms read one input: attention and the
feed-forward layer run in parallel.
"""
