"""Compiled blocks compute what blocks compute; what a machine lacks is said before the start."""

import copy
from importlib.util import find_spec

import pytest
import torch
import torch._dynamo.utils
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from test_recompute import assert_same, built

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    Accelerator,
    AttentionKind,
    CompileKind,
    DataType,
    KernelsConfig,
    RunConfig,
)
from trainctl.errors import ExitCode
from trainctl.hardware import Hardware
from trainctl.hardware.packages import check_kernels
from trainctl.runs.layout import RunPaths
from trainctl.train.models.kernels import apply_kernels
from trainctl.train.models.model import blocks
from trainctl.train.models.recompute import wrap_blocks

COMPILED = KernelsConfig(compile=CompileKind.blocks)


@pytest.fixture
def counters():
    """Reset torch.compile and return its counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


def loss_and_gradients(model):
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"), [("llama", "full"), ("gpt2", "full"), ("llama", "selective")]
)
def test_compiled_blocks_give_the_same_gradients_in_one_graph_for_all(family, mode, counters):
    """Every other block is recomputed: it is compiled inside its checkpoint, or with one that keeps
    products.
    """
    plain = built(family)
    model = copy.deepcopy(plain)
    recompute = new_section("activation_checkpointing", mode, every_kth_block=2)
    wrap_blocks(model, recompute)
    apply_kernels(model, COMPILED)
    assert_same(loss_and_gradients(plain), loss_and_gradients(model), tolerance=1e-5)
    assert counters["stats"]["unique_graphs"] == 2  # one for each kind of block
    assert not counters["graph_break"]


@pytest.mark.slow
def test_curves_agree_with_compiled_blocks(tmp_path):
    """ZeRO-3's hooks that gather weights break the graphs, which must not change the results."""
    cases = []
    for index, (stage, kind) in enumerate([(0, CompileKind.none), (3, CompileKind.blocks)]):
        config = tiny_config(steps=4)
        config.zero_stage.stage = stage
        config.precision.compute = DataType.fp32
        config.kernels.compile = kind
        config.activation_checkpointing = new_section(
            "activation_checkpointing", "full", every_kth_block=2
        )
        config.checkpoint.at_end = False
        cases.append(Case(tiny_plan(config, 2), RunPaths(tmp_path / str(index))))
    train_cases(2, cases)
    plain, compiled = (curve(case.run) for case in cases)
    assert list(plain) == list(range(1, 5))
    for step, (loss, norm) in plain.items():
        assert compiled[step] == pytest.approx((loss, norm), rel=1e-5), step


@pytest.mark.slow
def test_a_compiled_block_keeps_its_products_and_no_more():
    """More than its input, which `full` keeps, and less than everything."""
    torch._dynamo.reset()
    kept = {}
    for mode in ("full", "selective", "none"):
        model = built("llama")
        wrap_blocks(model, new_section("activation_checkpointing", mode))
        apply_kernels(model, COMPILED)
        kept[mode] = kept_bytes(model)
    assert kept["full"] < 0.5 * kept["selective"] < kept["selective"] < 0.9 * kept["none"]


def kept_bytes(model):
    """Bytes of all tensors that a forward pass leaves for the backward pass."""
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids).loss.backward()
    return sum(sizes.values())


def test_without_kernels_the_model_is_left_alone():
    model = built()
    apply_kernels(model, KernelsConfig())
    assert all(layer._compiled_call_impl is None for layer in blocks(model))


GPU = Hardware(name="gpu", accelerator=Accelerator.cuda, nodes=1, devices_per_node=1)
CPU = Hardware(name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=1)


def config_with(section, **values):
    config = RunConfig()
    for name, value in values.items():
        setattr(getattr(config, section), name, value)
    return config


def test_a_missing_package_is_named_with_what_does_without_it():
    config = config_with("model", attention=AttentionKind.flash_attention_2)
    findings = list(check_kernels(config, GPU))
    if find_spec("flash_attn") is not None:
        assert findings == []
        return
    (finding,) = findings
    assert finding.exit_code is ExitCode.environment
    assert "flash-attn" in finding.message
    assert finding.hint.startswith("model.attention=sdpa")


def test_compiling_for_a_cpu_needs_a_compiler(monkeypatch, tmp_path):
    config = config_with("kernels", compile=CompileKind.blocks)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = list(check_kernels(config, CPU))
    assert "C++ compiler" in finding.message
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert list(check_kernels(config, CPU)) == []


def test_a_plain_config_needs_nothing():
    assert list(check_kernels(RunConfig(), CPU)) == list(check_kernels(RunConfig(), GPU)) == []
