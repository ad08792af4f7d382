"""Bytes that a block keeps, against a trace of transformers' own block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from trainctl.config.schema import AttentionKind, ModelConfig
from trainctl.memory.activations import TrainableBlock, block_activations, tiled_activations

BATCH, SEQUENCE = 2, 128
MODELS = {
    family: ModelConfig(
        family=family,
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=None if family == "gpt2" else 32,
    )
    for family in ("llama", "mistral", "qwen3", "gpt2")
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_of_scores_are_in_the_format_of_the_softmax(family: str) -> None:
    """transformers' eager attention casts Llama's scores to fp32 for the softmax, GPT-2's not."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = replace(MODELS[family], attention=AttentionKind.eager)
    heads, length = model.num_attention_heads, 256
    scores = torch.randn(heads, length, length, dtype=torch.bfloat16, requires_grad=True)
    values = torch.randn(heads, length, 4, dtype=torch.bfloat16)
    to_fp32 = torch.float32 if family == "llama" else None
    result = torch.softmax(scores * 1.0, dim=-1, dtype=to_fp32).to(torch.bfloat16) @ values
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        torch.autograd.grad(result, scores, torch.ones_like(result))
    held = most = 0
    for event in record.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    of_length = [
        block_activations(model, sequence_length=tokens, element=2).attention_gradient
        for tokens in (length, 2 * length)
    ]
    planned = (of_length[1] - of_length[0]) * length
    assert most == pytest.approx(planned, rel=0.05)


def traced_bytes_per_token(
    model: ModelConfig,
    attention: str,
    dtype_name: str,
    *,
    autocast: bool = False,
    tiles: int = 1,
    change: Callable[[Any], Iterable[Any]] | None = None,
) -> float:
    """Bytes per token that autograd saves for one block, each storage counted once; under autocast
    to bf16 without the casts of the weights. `change` alters the block, and gives new weights."""
    import torch

    hidden, block, arguments, shared = real_block(model, attention, dtype_name)
    if change is not None:
        shared += change(block)
    if tiles > 1:
        from trainctl.train.models.kernels import tile_feed_forward

        tile_feed_forward(block, tiles)
    ignored = {tensor.untyped_storage().data_ptr() for tensor in shared}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            saved[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        output = block(hidden, **arguments)
    total = sum(storage.nbytes() for storage in saved.values())
    if autocast:
        total -= sum(2 * tensor.numel() for tensor in block.parameters() if tensor.dim() == 2)
    del output
    return total / (BATCH * SEQUENCE)


def real_block(model: ModelConfig, attention: str, dtype_name: str):
    """Return an input, transformers' block, the block's other arguments, and tensors that do not
    count as activations.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    dtype = getattr(torch, dtype_name)
    if model.family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=256, n_inner=704, n_head=8, n_layer=1, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        )
    else:
        config = transformers.AutoConfig.for_model(
            model.family,
            hidden_size=256,
            intermediate_size=704,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            num_hidden_layers=1,
            vocab_size=64,
        )
    config._attn_implementation = attention
    whole = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    hidden = torch.randn(BATCH, SEQUENCE, 256, dtype=dtype, requires_grad=True)
    shared = list(whole.parameters())
    arguments = {}
    if model.family == "gpt2":
        block = whole.transformer.h[0]
    else:
        block = whole.model.layers[0]
        rotary = whole.model.rotary_emb(hidden, torch.arange(SEQUENCE)[None])
        arguments["position_embeddings"] = rotary
        shared += rotary
    return hidden, block, arguments, shared


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MODELS)
def test_closed_form_is_what_autograd_saves(family: str, attention: str, dtype: str) -> None:
    model = replace(MODELS[family], attention=AttentionKind(attention))
    ours = block_activations(
        model, sequence_length=SEQUENCE, element=2 if dtype == "bfloat16" else 4
    ).saved
    assert ours == pytest.approx(traced_bytes_per_token(model, attention, dtype), rel=0.005)


NORMS = frozenset({"input_layernorm.weight", "ln_1.weight", "mlp.down_proj.weight"})
FROZEN = {
    "nothing learns": TrainableBlock(weights=frozenset()),
    "a norm and a product learn": TrainableBlock(weights=NORMS),
    "queries and values have adapters": TrainableBlock(
        weights=frozenset(), ranks=(("self_attn.q_proj", 8), ("self_attn.v_proj", 8))
    ),
    "all layers have adapters": TrainableBlock(
        weights=frozenset(),
        ranks=tuple(
            (f"{module}_proj", 4)
            for module in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        ),
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in ("llama", "qwen3") for name in FROZEN]
    + [("gpt2", name) for name, learning in FROZEN.items() if not learning.ranks],
)
def test_a_frozen_layer_keeps_no_input(family: str, name: str, attention: str) -> None:
    """Adapters are written plainly here, as two products beside the frozen one."""
    import torch
    from torch.nn import functional

    learning = FROZEN[name]

    def change(block: Any) -> list[Any]:
        added = []
        for parameter_name, parameter in block.named_parameters():
            parameter.requires_grad_(parameter_name in learning.weights)
        for layer_name, rank in learning.ranks:
            layer = block.get_submodule(layer_name)
            first, second = (
                torch.randn(rank, layer.in_features),
                torch.randn(layer.out_features, rank),
            )
            pair = [item.bfloat16().requires_grad_() for item in (first, second)]
            added += pair

            def forward(x: Any, layer: Any = layer, pair: Any = pair) -> Any:
                low = functional.linear(functional.linear(x, pair[0]), pair[1])
                return functional.linear(x, layer.weight) + low * 2.0

            layer.forward = forward
        return added

    model = replace(MODELS[family], attention=AttentionKind(attention))
    ours = block_activations(model, sequence_length=SEQUENCE, element=2, learning=learning)
    traced = traced_bytes_per_token(model, attention, "bfloat16", change=change)
    assert ours.saved == pytest.approx(traced, rel=0.005)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MODELS)
def test_products_are_what_selective_keeps(family: str, attention: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from trainctl.train.models.selective import SAVED_OPERATIONS

    sizes = []

    class Kept(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func.name() in SAVED_OPERATIONS:
                results = output if isinstance(output, tuple) else (output,)
                sizes.extend(result.untyped_storage().nbytes() for result in results)
            return output

    model = replace(MODELS[family], attention=AttentionKind(attention))
    hidden, block, arguments, _ = real_block(model, attention, "bfloat16")
    with Kept():
        block(hidden, **arguments)
    ours = block_activations(model, sequence_length=SEQUENCE, element=2).products
    assert ours * BATCH * SEQUENCE == sum(sizes)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_autocast_keeps_a_cast_for_each_product(family: str) -> None:
    model = MODELS[family]
    ours = block_activations(model, sequence_length=SEQUENCE, element=2, autocast=True).saved
    traced = traced_bytes_per_token(model, "sdpa", "float32", autocast=True)
    assert ours == pytest.approx(traced, rel=0.005)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_nothing_inside_a_feed_forward_layer_in_tiles_is_kept(family: str) -> None:
    whole = block_activations(MODELS[family], sequence_length=SEQUENCE, element=2)
    beside = 2 * 2 * MODELS[family].hidden_size
    ours = tiled_activations(whole, 4, gradients=beside)
    traced = traced_bytes_per_token(MODELS[family], "sdpa", "bfloat16", tiles=4)
    assert ours.saved == pytest.approx(traced, rel=0.005)
    assert ours.saved == whole.saved - whole.feed_forward
    assert ours.backward_extra(ours.saved) < whole.backward_extra(whole.saved) + whole.feed_forward
    assert tiled_activations(whole, 1, gradients=beside) == whole


def test_tensor_ranks_share_heads_and_feed_forward_but_not_norms() -> None:
    whole = block_activations(MODELS["llama"], sequence_length=SEQUENCE, element=2)
    shard = block_activations(MODELS["llama"], sequence_length=SEQUENCE, element=2, tensor=2)
    assert shard.norms == whole.norms
    assert shard.attention == whole.attention / 2
    assert shard.feed_forward == whole.feed_forward / 2


def test_window_shorter_than_the_sequence_expands_keys() -> None:
    model = ModelConfig(family="mistral", num_key_value_heads=1, sliding_window=64)
    masked = block_activations(model, sequence_length=128, element=2)
    unmasked = block_activations(model, sequence_length=64, element=2)
    assert masked.attention > unmasked.attention
