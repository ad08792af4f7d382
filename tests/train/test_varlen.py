"""Masked documents on a GPU: their bounds reach attention, and no mask of all pairs of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import masking_utils

from trainctl.config.compose import compose
from trainctl.engines.micro_batch import MicroBatch, document_lengths
from trainctl.hardware import resolve_hardware
from trainctl.plans.settings import reads_document_bounds
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.train.models import varlen
from trainctl.train.models.model import materialise
from trainctl.train.models.selective import SAVED_OPERATIONS
from trainctl.train.models.varlen import VARLEN, has_flash_attention, varlen_kernel
from trainctl.train.models.weights import SeedWeights
from trainctl.train.session import plan_skeleton

LENGTHS = (9, 7, 16)
SMALL = (
    "recipe=tiny",
    "data.mask_documents=true",
    "model.num_attention_heads=4",
    "model.max_position_embeddings=32",
    "training.sequence_length=32",
)
GPU = (
    "hardware=h100-80g",
    "hardware.devices_per_node=1",
    "kernels=plain",
    "zero_stage=1",
    "precision=bf16",
)


def plan_of(*overrides: str) -> RunPlan:
    config = compose([*SMALL, *GPU, *overrides]).config
    made = resolve(config, resolve_hardware(config.hardware))
    assert made.plan is not None, made.findings
    return made.plan


def by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Stand in for torch's kernel on the CPU: each document by itself."""
    assert bounds is key_bounds and longest == longest_key == int(bounds.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1]) and window_size[1] == 0
    found = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        parts = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
        places = torch.arange(end - start)
        apart = places[:, None] - places
        mask = apart >= 0
        if window_size[0] >= 0:
            mask &= apart <= window_size[0]
        one = F.scaled_dot_product_attention(*parts, mask, scale=scale, enable_gqa=enable_gqa)
        found.append(one[0].transpose(0, 1))
    return torch.cat(found)


def test_batches_of_a_compiled_model_have_few_shapes() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = set()
    for _ in range(50):
        lengths = torch.randint(1, 100, (20,), generator=generator).tolist()
        positions = torch.cat([torch.arange(each) for each in lengths])[None]
        exact = document_lengths(positions, torch.device("cpu"))
        rounded = document_lengths(positions, torch.device("cpu"), rounded=True)
        bounds, longest = rounded["cu_seq_lens_q"], rounded["max_length_q"]
        assert torch.equal(bounds.unique(), exact["cu_seq_lens_q"])  # the others are empty
        assert exact["max_length_q"] == max(lengths) <= longest < 2 * max(lengths)
        shapes.add((len(bounds), longest))
    assert shapes <= {(33, 64), (33, 128)}


def batch() -> MicroBatch:
    ids = torch.randint(1, 250, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(each) for each in LENGTHS]).repeat(2, 1)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)]).repeat(2, 1)
    return MicroBatch(
        input_ids=ids,
        labels=ids,
        position_ids=positions,
        document_ids=documents,
        sample_ids=torch.arange(2),
        is_masked=True,
    )


def logits_and_gradients(plan: RunPlan) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    model = plan_skeleton(plan).float()
    materialise(model, SeedWeights(0, std=0.2), torch.device("cpu"))
    flash = has_flash_attention(model)
    inputs = batch().model_inputs(torch.device("cpu"), flash_attention=flash)
    logits = model(**inputs).logits
    logits.square().mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return model, logits.detach(), gradients


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
def test_no_mask_of_all_pairs_reaches_attention_on_a_gpu(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"model.family={family}"]
    if family == "mistral":  # some documents are longer
        overrides.append("model.sliding_window=8")
    if family == "gpt2":
        overrides.append("model.num_key_value_heads=null")
    _, wanted, gradients = logits_and_gradients(plan_of(*overrides, "hardware=cpu"))

    def attend(*args: Any, **settings: Any) -> None:
        raise AssertionError("sdpa")

    monkeypatch.setattr(varlen, "varlen_kernel", lambda: by_document)
    monkeypatch.setattr(varlen, "sdpa_attention_forward", attend)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", attend)  # nor is one made
    model, found, its = logits_and_gradients(plan_of(*overrides))
    assert model.config._attn_implementation == VARLEN
    assert torch.allclose(found, wanted, atol=1e-4 * wanted.std())
    for name, gradient in gradients.items():
        assert torch.allclose(its[name], gradient, atol=1e-4 * gradient.abs().max()), name


def test_a_pass_without_bounds_is_that_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: by_document)
    ids = {"input_ids": batch().input_ids, "use_cache": False}
    found = []
    for hardware in ("h100-80g", "cpu"):
        model = plan_skeleton(plan_of(f"hardware={hardware}")).float().eval()
        materialise(model, SeedWeights(0, std=0.2), torch.device("cpu"))
        padded = torch.ones_like(ids["input_ids"]).index_fill_(1, torch.arange(4), 0)
        with torch.no_grad():
            found += [model(**ids).logits, model(**ids, attention_mask=padded).logits[:, 4:]]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_torchs_kernel_has_the_arguments_that_are_passed() -> None:
    kernel = varlen_kernel()
    if kernel is None:
        pytest.skip("this torch has no such kernel")
    operation = torch.ops.torch_attn._varlen_attn.default
    assert operation.name() in SAVED_OPERATIONS
    with torch.device("meta"):
        query, key = torch.empty(32, 4, 16), torch.empty(32, 2, 16)
        bounds = torch.empty(4, dtype=torch.int32)
        settings: dict[str, Any] = {"scale": 0.1, "window_size": (-1, 0), "enable_gqa": True}
        assert kernel(query, key, key, bounds, bounds, 16, 16, **settings).shape == (32, 4, 16)


@pytest.mark.parametrize(
    ("override", "reads"),
    [
        ("seed=1", True),
        ("precision=fp32", False),
        ("hardware=cpu", False),
        ("hardware=t4-16g", False),
        ("data.mask_documents=false", False),
        ("model.attention=eager", False),
        ("model.head_dim=12", False),
    ],
)
def test_bounds_are_read_where_the_kernel_runs(override: str, reads: bool) -> None:
    override = override.replace("seed", "training.seed")
    config = compose([*SMALL, *GPU, override]).config
    assert reads_document_bounds(config, resolve_hardware(config.hardware)) is reads


def test_the_plan_says_how_documents_are_kept_apart() -> None:
    told = [item for item in plan_of().derived if item.key == "document_attention"]
    assert [item.value for item in told] == ["bounds"]
    told = [item for item in plan_of("model.head_dim=12").derived if item.key == told[0].key]
    assert [item.value for item in told] == ["mask"]
    assert not [
        item for item in plan_of("hardware=cpu").derived if item.key == "document_attention"
    ]


def test_a_model_with_dropout_in_attention_makes_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: by_document)
    model = plan_skeleton(plan_of())
    model.config._attn_implementation = "sdpa"
    model.config.attention_dropout = 0.1
    assert not varlen.use_varlen(model) and not has_flash_attention(model)
