"""What a module says of itself, and its weights: drawn, saved, exported and loaded again."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from fabricated import fabricate
from module_cases import module_config, module_section
from own_module import Bare, Full, Sizes
from rank_processes import tiny_config, tiny_plan
from torch import nn

import trainctl as tc
from trainctl.config.registry import new_section
from trainctl.errors import TrainctlError
from trainctl.models.anatomy import parse_anatomy
from trainctl.plans.flops import flops_per_token
from trainctl.plans.optimizers import parameter_groups
from trainctl.plans.shapes import count_parameters
from trainctl.runs.layout import RunPaths
from trainctl.train.export.directory import export
from trainctl.train.export.output import NOT_LOADED
from trainctl.train.models.anatomy import anatomy
from trainctl.train.models.loaded import load
from trainctl.train.models.model import blocks, materialise, skeleton
from trainctl.train.models.module import ModuleModel
from trainctl.train.models.trace import trace
from trainctl.train.models.weights import NonShardableInit, SeedWeights


@pytest.mark.parametrize("function", ["bare", "full"])
def test_the_plan_counts_the_module_s_own(function: str) -> None:
    config, module = module_config(function), Full(Sizes())
    assert count_parameters(config.model).total == sum(p.numel() for p in module.parameters())
    assert config.model.vocab_size == 264 and config.model.hidden_size == 32
    assert parse_anatomy(config.model.anatomy).to_table() == config.model.anatomy
    _, others = parameter_groups(config)
    assert "unembed.bias" in others.parameters and "tokens.weight" in others.parameters
    assert ("unembed.weight" in others.parameters) == (function == "full")
    # Counted by torch for one, said by the module for the other.
    for length in (7, 100, 4096):
        assert flops_per_token(config.model, length) == module.flops_per_token(length)


def test_initial_values_are_those_of_the_constructors_or_of_initialize() -> None:
    bare, full = (skeleton(module_section(name, ()), torch.float32) for name in ("bare", "full"))
    assert all(parameter.is_meta for parameter in bare.parameters())
    assert len(blocks(bare)) == 4
    drawn = SeedWeights.of(module_section("bare", ()), bare, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Bare(Sizes())
    for name, parameter in module.named_parameters():
        values = drawn.read(name, parameter.shape, 0, parameter.numel())
        assert values.mean() == pytest.approx(parameter.mean().item(), abs=0.05), name
        assert values.std() == pytest.approx(parameter.std().item(), abs=0.05), name
    own = SeedWeights.of(module_section("full", ()), full, seed=1)
    assert own.read("mixers.0.decay", torch.Size([32]), 0, 2).tolist() == pytest.approx(
        torch.linspace(-1, 1, 32)[:2].tolist()
    )
    assert own.read("mixers.1.down.bias", torch.Size([32]), 0, 32).std() > 0


class Computed(nn.Module):
    """A module with a value that only its constructor computes, and one tensor in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(264, 8), nn.Linear(8, 264, bias=False)
        self.head.weight = self.embed.weight
        self.mixers = nn.ModuleList([nn.Linear(8, 8)])
        self.slope = nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixers[0](self.embed(input_ids)) * self.slope)


def test_what_only_a_constructor_knows_is_named() -> None:
    model = new_section("model", "module", factory="test_module_export:Computed")
    built = skeleton(model, torch.float32)
    with pytest.raises(NonShardableInit, match="slope"):
        SeedWeights.of(model, built, seed=1)
    found = anatomy(model)
    assert found.unsharded_init == "slope"
    assert found.has_tied_head and len(found.ties) == 1
    pieces = materialise(built, _Zeros(), torch.device("cpu"))
    assert len(pieces) == 4 and built.module.head.weight is built.module.embed.weight


class Features(Computed):
    """A module with a buffer that its constructor draws."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.randn(8), persistent=False)


def test_a_drawn_buffer_is_the_same_in_every_process() -> None:
    model = new_section("model", "module", factory="test_module_export:Features")
    state = torch.get_rng_state()
    first = skeleton(model, torch.float32).module.angles
    assert torch.equal(state, torch.get_rng_state()) and first.std() > 0
    torch.manual_seed(5)
    assert torch.equal(skeleton(model, torch.float32).module.angles, first)


def without_blocks() -> nn.Module:
    return nn.Sequential(nn.Embedding(264, 8), nn.Linear(8, 264))


def frozen() -> nn.Module:
    module = Computed()
    module.slope.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("without_blocks", "without_blocks: Sequential has no blocks"),
        ("frozen", r"Computed has parameters that do not train \(slope\)"),
    ],
)
def test_what_a_module_lacks_is_said_where_it_is_counted(function: str, words: str) -> None:
    model = new_section("model", "module", factory=f"test_module_export:{function}")
    with pytest.raises(TrainctlError, match=words):
        anatomy(model)


class Copied(nn.Module):
    """Module with copied blocks, a parameter that is set after it was registered, and another made
    of it.
    """

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(4, 4)
        nn.init.constant_(block.bias, 3.0)
        self.mixers = nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        nn.init.constant_(self.mixers[1].bias, 5.0)
        scale = nn.Parameter(torch.empty(4))
        self.scale = scale
        nn.init.constant_(scale, 7.0)
        self.halved = nn.Parameter(self.scale / 2)


def test_copies_and_other_names_of_a_parameter_start_as_constructors_say() -> None:
    model = new_section("model", "module", factory="test_module_export:Copied")
    built = skeleton(model, torch.bfloat16)
    with pytest.raises(NonShardableInit, match="halved"):
        built.own_initializers()
    del built.module.halved
    laws = built.own_initializers()
    constants = {name: law.law.constant() for name, (law,) in laws.items() if law.stop == 4}
    assert constants == {"mixers.0.bias": 3.0, "mixers.1.bias": 5.0, "scale": 7.0}
    assert laws["mixers.1.weight"] == laws["mixers.0.weight"]


class Tabled(Computed):
    """A module that adds a table of fp32, whatever the type of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(64, 8), persistent=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixers[0](self.embed(input_ids) + self.table[position_ids]))


def test_products_of_two_types_are_refused_before_the_start() -> None:
    asked = new_section("model", "module", factory="test_module_export:Tabled")
    config = tiny_config(precision__compute="bf16", sequence_length=16)
    config.model = asked
    with pytest.raises(
        TrainctlError, match=r"bfloat16 by float32 \(.*test_module_export.py:"
    ) as found:
        trace(config)
    assert "table.to(hidden.dtype)" in str(found.value.hint)
    for works in ({"engine__kind": "fsdp2"}, {"precision__autocast": True}):
        config = tiny_config(precision__compute="bf16", sequence_length=16, **works)
        config.model = asked
        trace(config)


class _Zeros:
    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        return torch.zeros(end - start)

    def buffer(self, name: str) -> None:
        return None


def test_an_export_is_loaded_with_the_same_logits(tmp_path: Path) -> None:
    plan = tiny_plan(module_config("full", steps=1, arguments={"depth": 2}), 1)
    checkpoint = fabricate(RunPaths(tmp_path / "run"), plan.config.model)
    written = export(plan.config, checkpoint, tmp_path / "out", dtype=torch.float32)
    assert NOT_LOADED in written.notes and "config.json" not in written.files
    content = json.loads((tmp_path / "out" / "module.json").read_text())
    assert content["factory"] == "own_module:full" and content["arguments"]["depth"] == 2
    theirs, tokenizer = tc.load(tmp_path / "out")
    assert tokenizer is None, "bytes have no files"
    assert type(theirs) is Full and theirs.sizes == Sizes(depth=2)
    ours = load(plan, checkpoint, "cpu", lambda *_: None)
    assert isinstance(ours.model, ModuleModel)
    ids = torch.randint(0, 264, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = theirs(ids, torch.arange(12).expand_as(ids))
        assert torch.equal(found, ours.model(ids).logits)
    assert torch.equal(ours.next_scores(ids[0].tolist()), found[0, -1])
