"""GPU tests that all kernels train to the same losses, and that block inputs are offloaded."""

from __future__ import annotations

import copy
import gc
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import events, trainctl

sys.path.append(str(Path(__file__).parents[1] / "train"))
from test_recompute import built

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    CrossEntropyKind,
    KernelsConfig,
)
from trainctl.engines.micro_batch import MicroBatch
from trainctl.train.models.kernels import apply_kernels
from trainctl.train.models.recompute import wrap_blocks
from trainctl.train.models.varlen import use_varlen
from trainctl.train.objectives.loss import LanguageModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
needs_liger = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="no liger-kernel here")
needs_flash = pytest.mark.skipif(find_spec("flash_attn") is None, reason="no flash-attn here")

SMALL = (
    "model=tiny-llama",
    "precision=bf16",
    "hardware.devices_per_node=1",
    "training.seed=7",
    "training.steps=20",
    "training.sequence_length=512",
    "training.micro_batch_size=4",
    "training.gradient_accumulation_steps=2",
    "training.evaluation_samples=0",
    "data.max_bytes=2000000",
    "checkpoint.at_end=false",
)


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("plain"), "kernels=plain")


def losses(folder: Path, *choices: str) -> list[float]:
    """Return the loss of each step of a launch with these options."""
    trainctl("launch", *SMALL, *choices, "--run-dir", "run", cwd=folder)
    return [step["loss"] for step in events(folder / "run", "step")]


@pytest.mark.parametrize(
    "choices",
    [
        ("kernels=chunked-loss", "kernels.chunk_tokens=256"),
        ("kernels=compiled",),
        ("kernels=compiled", "activation_checkpointing=selective"),
        ("kernels=compiled", "zero_stage=3", "activation_checkpointing=full"),
        ("kernels=deepcompile", "zero_stage=3"),
        pytest.param(("kernels=liger",), marks=needs_liger),
        pytest.param(("kernels=liger", "zero_stage=3"), marks=needs_liger),
        pytest.param(("kernels=liger", "activation_checkpointing=selective"), marks=needs_liger),
        pytest.param(("model.attention=flash_attention_2",), marks=needs_flash),
        ("activation_checkpointing=selective",),
        ("activation_checkpointing=offloaded", "zero_stage=3"),
    ],
    ids=" ".join,
)
def test_the_curve_matches_the_plain_kernels(
    tmp_path: Path, plain_losses: list[float], choices: tuple[str, ...]
) -> None:
    assert plain_losses[-1] < plain_losses[0]
    assert losses(tmp_path, *choices) == pytest.approx(plain_losses, abs=0.02)


def loss_and_gradients(
    model: torch.nn.Module, ids: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model({"input_ids": ids}, ids.roll(-1, dims=1))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@needs_liger
@pytest.mark.parametrize("z_loss", [0.0, 0.02])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_ligers_kernels_give_the_same_gradients_in_fp32(family: str, z_loss: float) -> None:
    ids = torch.randint(0, 64, (2, 64), device="cuda")
    kernels = KernelsConfig(liger=True, cross_entropy=CrossEntropyKind.liger_fused)
    plain = LanguageModel(built(family).cuda(), None, KernelsConfig(), z_loss)
    other = copy.deepcopy(plain.model)
    apply_kernels(other, kernels)
    loss, gradients = loss_and_gradients(LanguageModel(other, None, kernels, z_loss), ids)
    plain_loss, wanted = loss_and_gradients(plain, ids)
    assert loss == pytest.approx(plain_loss, rel=1e-4)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-2, atol=1e-2, msg=name)


@needs_flash
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flash_attention_keeps_to_the_documents_of_every_sample(family: str) -> None:
    ids = torch.randint(0, 64, (2, 64))
    positions = torch.stack([torch.cat([torch.arange(24), torch.arange(40)]), torch.arange(64)])
    batch = MicroBatch(ids, ids, positions, positions, torch.arange(2), is_masked=True)
    device = torch.device("cuda")
    model = built(family).to(device, torch.bfloat16).eval()
    with torch.no_grad():
        expected = model(**batch.model_inputs(device)).logits
        model.set_attn_implementation("flash_attention_2")
        found = model(**batch.model_inputs(device, flash_attention=True)).logits
        across = model(input_ids=ids.to(device), use_cache=False).logits
    difference = (found - expected).abs().max()
    assert difference < 0.1 * (across - expected).abs().max()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_torchs_varlen_keeps_to_the_documents_of_every_sample(family: str, compiled: bool) -> None:
    """With the documents' bounds, and with those of empty ones behind them."""
    ids = torch.randint(0, 64, (2, 64))
    positions = torch.stack([torch.cat([torch.arange(24), torch.arange(40)]), torch.arange(64)])
    batch = MicroBatch(ids, ids, positions, positions, torch.arange(2), is_masked=True)
    device = torch.device("cuda")
    model = built(family).to(device, torch.bfloat16)

    def logits_and_gradient(flash: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        inputs = batch.model_inputs(device, flash_attention=flash, compiled=compiled)
        logits = model(**inputs).logits
        logits.float().square().mean().backward()
        return logits.detach(), model.get_input_embeddings().weight.grad.clone()

    expected, wanted = logits_and_gradient(False)
    across = model(input_ids=ids.to(device), use_cache=False).logits.detach()
    if not use_varlen(model):
        pytest.skip("this torch has no such kernel")
    found, gradient = logits_and_gradient(True)
    assert (found - expected).abs().max() < 0.1 * (across - expected).abs().max()
    assert (gradient - wanted).norm() < 0.05 * wanted.norm()


def kept_bytes_and_gradient(
    model: torch.nn.Module, ids: torch.Tensor, *, offload: bool
) -> tuple[int, torch.Tensor]:
    """Return the memory that a forward pass keeps, and the gradient of the embeddings."""
    wrapped = copy.deepcopy(model)
    wrap_blocks(wrapped, new_section("activation_checkpointing", "full", offload_to_cpu=offload))
    whole = LanguageModel(wrapped, None, KernelsConfig())
    gc.collect()  # a wrapped model before, whose blocks refer to each other
    before = torch.cuda.memory_allocated()
    loss = whole({"input_ids": ids}, ids)
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    gradient = wrapped.get_input_embeddings().weight.grad
    assert gradient is not None
    return kept, gradient


def test_offloaded_block_inputs_are_not_on_the_device() -> None:
    ids = torch.randint(0, 64, (8, 1024), device="cuda")
    model = built().cuda()
    # The first product allocates cuBLAS' workspace, which stays.
    LanguageModel(copy.deepcopy(model), None, KernelsConfig())({"input_ids": ids}, ids).backward()
    kept, expected = kept_bytes_and_gradient(model, ids, offload=False)
    kept_offloaded, found = kept_bytes_and_gradient(model, ids, offload=True)
    assert kept - kept_offloaded == 4 * ids.numel() * 32 * 4  # blocks x tokens x width x bytes
    # Embeddings add their gradients in any order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
