"""Recomputed blocks: the same gradients, less kept, and inputs that wait where they should."""

import copy
import functools
import gc
import sys

import pytest
import torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    DataType,
    ModelConfig,
)
from trainctl.errors import TrainctlError
from trainctl.runs.layout import RunPaths
from trainctl.train.models.model import blocks, materialise, skeleton
from trainctl.train.models.recompute import wrap_blocks
from trainctl.train.models.selective import SAVED_OPERATIONS
from trainctl.train.models.weights import SeedWeights
from trainctl.tuning.speed import with_values

FAMILIES = ["llama", "mistral", "qwen3", "gpt2"]
LAYERS = 4
NONE, FULL, SELECTIVE = "none", "full", "selective"


def built(family="llama"):
    return copy.deepcopy(_made(family))


@functools.cache
def _made(family):
    config = ModelConfig(
        family=family, vocab_size=64, hidden_size=32, intermediate_size=96, num_layers=LAYERS,
        num_key_value_heads=None if family == "gpt2" else 2, tie_word_embeddings=True,
    )  # fmt: skip
    model = skeleton(config, torch.float32)
    materialise(model, SeedWeights(3, std=0.3), torch.device("cpu"))
    return model


def wrapped(model, group=None, *, mode, **settings):
    model = copy.deepcopy(model)
    count = wrap_blocks(model, new_section("activation_checkpointing", mode, **settings), group)
    return model, count


class LiveTensors(TorchDispatchMode):
    """The bytes of all storages made within it that are still there, whoever holds them."""

    def __init__(self, model):
        super().__init__()
        self._made = {}
        self._weights = {StorageWeakRef(p.untyped_storage()) for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        return output

    @property
    def size(self):
        made = self._made.items()
        return sum(size for at, size in made if not at.expired() and at not in self._weights)


def trained(model):
    """Loss, gradients by name, and the bytes that wait for the backward pass."""
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    with LiveTensors(model) as live:
        loss = model(input_ids=ids, labels=ids).loss
    size = live.size
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, size


def assert_same(one, other, tolerance=1e-6):
    assert other[0] == pytest.approx(one[0], abs=tolerance)
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("settings", "blocks_wrapped"),
    [
        ({"mode": NONE}, 0),
        ({"mode": FULL}, 4),
        ({"mode": FULL, "every_kth_block": 2}, 2),
        ({"mode": FULL, "every_kth_block": 3, "offload_to_cpu": True}, 2),
        ({"mode": SELECTIVE}, 4),
        ({"mode": SELECTIVE, "every_kth_block": 4, "offload_to_cpu": True}, 1),
    ],
    ids=str,
)
def test_gradients_match_a_run_without_recomputation(family, settings, blocks_wrapped):
    model = built(family)
    recomputed, count = wrapped(model, **settings)
    assert count == blocks_wrapped
    assert_same(trained(model), trained(recomputed))


def test_the_first_of_every_k_blocks_is_recomputed():
    model, _ = wrapped(built(), mode=FULL, every_kth_block=3)
    assert [layer.gradient_checkpointing for layer in blocks(model)] == [True, False, False, True]


def test_nothing_to_wrap_is_an_error():
    with pytest.raises(TrainctlError, match="0 are wrapped"):
        wrap_blocks(torch.nn.Linear(2, 2), new_section("activation_checkpointing", FULL))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_recomputed_in_the_backward_pass_and_not_computed_twice_before(family):
    model, _ = wrapped(built(family), mode=FULL)
    calls = []
    for layer in blocks(model):
        feed_forward = layer.mlp
        feed_forward.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.zeros((1, 8), dtype=torch.long)
    loss = model(input_ids=ids, labels=ids).loss
    assert len(calls) == LAYERS
    loss.backward()
    assert len(calls) == 2 * LAYERS


class Products(TorchDispatchMode):
    """Counts what `selective` promises to keep."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.name() in SAVED_OPERATIONS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_selective_multiplies_no_matrix_again(family):
    counts = {}
    for mode in (NONE, FULL, SELECTIVE):
        model, _ = wrapped(built(family), mode=mode)
        with Products() as products:
            trained(model)
        counts[mode] = products.calls
    assert counts[SELECTIVE] == counts[NONE] < counts[FULL]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_mode_keeps_less_and_full_keeps_a_block_input_only(family):
    kept = {}
    for name, settings in {
        "none": {"mode": NONE},
        "full": {"mode": FULL},
        "half": {"mode": FULL, "every_kth_block": 2},
        "selective": {"mode": SELECTIVE},
    }.items():
        model, _ = wrapped(built(family), **settings)
        *_, kept[name] = trained(model)
    assert kept["full"] < kept["half"] < kept["none"]
    assert kept["full"] < kept["selective"] < 0.75 * kept["none"]


def python_calls(model):
    """Number of Python functions that are called in a forward and a backward pass."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    ids = torch.zeros((1, 8), dtype=torch.long)
    for profile in (None, count):  # the first pass imports and caches
        sys.setprofile(profile)
        try:
            model(input_ids=ids, labels=ids).loss.backward()
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_recomputation_calls_little_more_than_the_forward_pass_again(family):
    """Torch's own checkpoint calls three times as much, a mode at each function twice that."""
    modes = (NONE, FULL, SELECTIVE)
    none, full, selective = (python_calls(wrapped(built(family), mode=mode)[0]) for mode in modes)
    assert full <= 3 * none
    assert selective <= 1.5 * full


class Block(GradientCheckpointingLayer):
    """A block with a product and what a test does to it."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.between = between

    def forward(self, hidden):
        return hidden + self.second(self.between(self.first(hidden)))


Block.__module__ = "transformers.models.own"


def block_gradients(between, mode):
    torch.manual_seed(0)
    block = Block(between)
    wrap_blocks(block, new_section("activation_checkpointing", mode))
    hidden = torch.ones(4, 8, requires_grad=True)
    block(hidden).square().sum().backward()
    return [hidden.grad, *(each.grad for each in block.parameters())]


@pytest.mark.parametrize("mode", [FULL, SELECTIVE])
@pytest.mark.parametrize(
    "between",
    [
        lambda product: product.mul_(2).tanh(),  # a kept product that changes
        lambda product: torch.nn.functional.dropout(product, 0.5).tanh(),
        lambda product: (product @ product.T) @ product,
    ],
    ids=["in place", "random", "other products"],
)
def test_a_block_is_repeated_as_it_was(between, mode):
    for one, other in zip(
        block_gradients(between, NONE), block_gradients(between, mode), strict=True
    ):
        torch.testing.assert_close(other, one)


def test_a_block_whose_input_changed_is_not_recomputed():
    block = Block(torch.tanh)
    wrap_blocks(block, new_section("activation_checkpointing", FULL))
    hidden = torch.ones(4, 8, requires_grad=True) * 1
    output = block(hidden)
    hidden.detach().mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        output.sum().backward()


def test_a_block_that_does_not_repeat_itself_is_an_error():
    rows = iter((4, 3))
    block = Block(lambda product: product[: next(rows)].tanh().mean(0, keepdim=True))
    wrap_blocks(block, new_section("activation_checkpointing", FULL))
    output = block(torch.ones(4, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="unlike its forward pass"):
        output.sum().backward()


@pytest.mark.parametrize("mode", [FULL, SELECTIVE])
def test_the_input_is_freed_with_the_backward_pass_by_no_garbage_collection(mode):
    block = Block(torch.tanh)
    wrap_blocks(block, new_section("activation_checkpointing", mode))
    hidden = torch.ones(4, 8, requires_grad=True) * 1
    storage = StorageWeakRef(hidden.untyped_storage())
    gc.disable()
    try:
        loss = block(hidden).sum()
        del hidden
        assert not storage.expired()
        loss.backward()
        assert storage.expired()
    finally:
        gc.enable()


def test_a_second_backward_pass_recomputes_again():
    block = Block(torch.tanh)
    wrap_blocks(block, new_section("activation_checkpointing", FULL))
    loss = block(torch.ones(4, 8, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    once = block.first.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(block.first.weight.grad, 2 * once)


def on_two_ranks(tmp_path, function):
    case = Case(tiny_plan(tiny_config(steps=1), 2), RunPaths(tmp_path))
    return train_cases(2, [case], probe=f"recompute_probe:{function}")


def test_partitioned_inputs_come_back_whole_and_take_half(tmp_path):
    inputs = LAYERS * 2 * 24 * 32 * 4  # blocks x samples x length x width x bytes
    for kept in on_two_ranks(tmp_path, "partitioned"):
        for whole, partitioned in kept.values():
            # The first input is the embedding's output, which nothing else keeps.
            assert whole - partitioned == inputs // 2


def test_a_kept_product_that_is_summed_in_place_is_not_summed_twice(tmp_path):
    assert on_two_ranks(tmp_path, "summed_in_place") == [0, 0]


def trained_on_ranks(tmp_path, *changes):
    """Curves of 6 fp32 steps on two processes, the same for all."""
    cases = []
    for index, change in enumerate(changes):
        config = tiny_config(steps=6)
        config.precision.compute = DataType.fp32
        config.checkpoint.at_end = False
        config = with_values(config, {k.replace("__", "."): value for k, value in change.items()})
        cases.append(Case(tiny_plan(config, 2), RunPaths(tmp_path / str(index))))
    train_cases(2, cases, together=True)
    return [curve(case.run) for case in cases]


@pytest.mark.slow
def test_curves_agree_at_zero_3_and_on_tensor_ranks(tmp_path):
    plain, partitioned, zero_3 = trained_on_ranks(
        tmp_path,
        {"zero_stage__stage": 1},
        {
            "zero_stage__stage": 1,
            "parallelism__tensor": 2,
            "activation_checkpointing__mode": SELECTIVE,
            "activation_checkpointing__partition_across_tensor_ranks": True,
            "activation_checkpointing__offload_to_cpu": True,
        },
        {
            "zero_stage__stage": 3,
            "activation_checkpointing__mode": SELECTIVE,
            "activation_checkpointing__every_kth_block": 2,
        },
    )
    assert list(plain) == list(range(1, 7))
    for step, (loss, norm) in plain.items():
        assert partitioned[step] == pytest.approx((loss, norm), rel=1e-5), step
        assert zero_3[step] == pytest.approx((loss, norm), rel=1e-5), step
