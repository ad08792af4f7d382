"""Feed-forward layers in tiles and the loss in chunks: the same gradients, and the same curve."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import ARCHITECTURES, made
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from test_recompute import built

from trainctl.config.registry import new_section
from trainctl.config.schema import CrossEntropyKind, DataType, KernelsConfig
from trainctl.errors import TrainctlError
from trainctl.runs.layout import RunPaths
from trainctl.train.models.kernels import tile_feed_forward
from trainctl.train.models.model import blocks
from trainctl.train.models.recompute import wrap_blocks
from trainctl.train.objectives.loss import LanguageModel

CHUNKED = KernelsConfig(cross_entropy=CrossEntropyKind.chunked, chunk_tokens=10)


def loss_and_gradients(model):
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    loss = model.train()({"input_ids": ids, "use_cache": False}, ids.roll(-1, dims=1))
    loss.backward()
    return loss.detach(), dict(model.named_parameters())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_parts_give_the_loss_and_gradients_of_the_whole(kind):
    """The chunks include the head's own scale and cap; every second block is recomputed too."""
    plain = LanguageModel(made(kind), None, KernelsConfig())
    other = LanguageModel(copy.deepcopy(plain.model), None, CHUNKED)
    if "gate" not in dict(other.model.named_modules()) and not has_experts(other.model):
        assert tile_feed_forward(other.model, 5) == len(blocks(other.model)) == 2
        wrap_blocks(other.model, new_section("activation_checkpointing", "full", every_kth_block=2))
    (expected, whole), (loss, parts) = loss_and_gradients(plain), loss_and_gradients(other)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in whole.items():
        if parameter.grad is not None:
            largest = float(parameter.grad.abs().max())
            assert float((parts[name].grad - parameter.grad).abs().max()) <= 1e-5 * largest, name


def has_experts(model):
    return any("experts" in name for name, _ in model.named_parameters())


def test_what_is_inside_a_layer_exists_for_one_tile_at_a_time():
    model = built()
    inner = blocks(model)[0].mlp.up_proj.out_features
    seen = []

    def pack(tensor):
        if tensor.shape[-1] == inner and tensor.dim() == 3:
            seen.append(tensor.shape[1])
        return tensor

    ids = torch.randint(0, 64, (2, 24))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids).logits.sum().backward()
        assert max(seen) == 24
        seen.clear()
        tile_feed_forward(model, 5)
        model(ids).logits.sum().backward()
    assert max(seen, default=0) <= 10  # 48 tokens in 5 parts
    model.eval()
    with torch.no_grad():
        assert model(ids[:1, :3]).logits.shape[1] == 3  # fewer tokens than tiles


def test_a_block_without_such_a_layer_is_reported():
    model = built()
    layer = blocks(model)[0]
    layer.something, layer.mlp = layer.mlp, None
    with pytest.raises(TrainctlError, match="no feed-forward layer"):
        tile_feed_forward(model, 2)


@pytest.mark.slow
def test_the_curve_is_the_plain_one_on_every_layout(tmp_path):
    kernels = {"kernels__mlp_tiles": 4}
    loss = {"kernels__cross_entropy": "chunked", "kernels__chunk_tokens": 25}
    full = {"activation_checkpointing": new_section("activation_checkpointing", "full")}
    offloaded = {**full, "activation_checkpointing__offload_to_cpu": True}
    layouts = {
        "plain": {"zero_stage__stage": 0},
        "0": {"zero_stage__stage": 0, **kernels},
        "1": {"zero_stage__stage": 1, **kernels, **loss},
        "2, recomputed": {"zero_stage__stage": 2, **kernels, **full},
        "3, recomputed": {"zero_stage__stage": 3, **kernels, **loss, **offloaded},
        "sequence": {"zero_stage__stage": 3, "parallelism__sequence": 2, **kernels, **loss, **full},
        "tensor": {"zero_stage__stage": 1, "parallelism__tensor": 2, **kernels},
        "pipeline": {"zero_stage__stage": 1, "parallelism__pipeline": 2, **kernels},
    }
    cases = {}
    for number, (name, values) in enumerate(layouts.items()):
        values = dict(values)
        section = values.pop("activation_checkpointing", None)
        away = values.pop("activation_checkpointing__offload_to_cpu", False)
        config = tiny_config(
            steps=4, sequence_length=32, checkpoint__at_end=False, evaluation_samples=0, **values
        )
        config.precision.compute = DataType.fp32
        if section is not None:
            config.activation_checkpointing = copy.deepcopy(section)
            config.activation_checkpointing.offload_to_cpu = away
        cases[name] = Case(tiny_plan(config, 2), RunPaths(tmp_path / str(number)))
    train_cases(2, list(cases.values()))
    plain = curve(cases["plain"].run)
    for name, case in cases.items():
        found = curve(case.run)
        assert list(found) == list(plain), name
        for step, (value, norm) in found.items():
            assert value == pytest.approx(plain[step][0], abs=1e-5), (name, step)
            assert norm == pytest.approx(plain[step][1], rel=1e-4), (name, step)
