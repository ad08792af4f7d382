"""A module's own plans of layouts: what they lack is said before a run starts."""

from types import SimpleNamespace

import own_module
import pytest
import torch
from module_cases import module_config
from parity_cases import Difference, limit
from rank_processes import Case, curve, tiny_plan, train_cases, with_stop
from torch import nn
from torch._subclasses import FakeTensorMode

from trainctl.engines.process import Axis
from trainctl.memory.engine import read_engine
from trainctl.memory.phases import resident_components
from trainctl.memory.stages import pipeline_stages
from trainctl.runs.layout import RunPaths
from trainctl.train.models.model import skeleton
from trainctl.train.models.module import ModuleModel
from trainctl.train.models.module_layouts import module_layouts, other_ranks
from trainctl.train.parallel.pipeline import cut_to_stage, tied_weight
from trainctl.train.session import shard_skeleton

SHAPE = SimpleNamespace(vocab_size=264, hidden_size=32, num_attention_heads=4, num_layers=2)


def layouts(cls, depth=2):
    def make():
        return ModuleModel.of(cls(own_module.Sizes(depth=depth)), SHAPE)

    with FakeTensorMode(allow_non_fake_inputs=True):
        return module_layouts(make)


def changed_plan(without=(), **styles):
    """Return the module's class with another tensor plan."""

    class Changed(own_module.Full):
        def tensor_plan(self):
            plan = super().tensor_plan() | {
                name.replace("__", "."): styles[name] for name in styles
            }
            return {name: style for name, style in plan.items() if name not in without}

    return Changed


def test_a_whole_plan_splits_what_it_names():
    shares, unsplit = layouts(own_module.Full)
    assert unsplit == {}
    assert shares["mixers.1.query.weight"] == shares["mixers.0.decay"] == 4  # heads
    assert shares["tokens.weight"] == shares["unembed.bias"] == 264
    assert "mixers.1.out.bias" not in shares and "end.weight" not in shares


def test_without_plans_no_axis_splits_it():
    assert layouts(own_module.Bare) == (
        {},
        {"tensor": "Bare has no tensor_plan()", "pipeline": "Bare has no pipeline_plan()"},
    )


LACKS = {
    "tensor_plan() names mixers.*.kye, and nothing has that name": {"mixers__*__kye": "colwise"},
    "tensor_plan() names mixers.1.query twice: mixers.*.query and *.*.query": {
        "*__*__query": "colwise"
    },
    "tensor_plan() says columns; it may say colwise": {"mixers__*__key": "columns"},
    "tensor_plan() says rowwise of mixers.0.decay, a parameter": {"mixers__*__decay": "rowwise"},
    "tensor_plan() names unembed.weight, which is split by tokens anyway": {"unembed": "colwise"},
    "place of": {"mixers__*__heads": "colwise"},  # a half of the heads, each twice as wide
}


@pytest.mark.parametrize("words", LACKS)
def test_what_a_tensor_plan_lacks_is_said(words):
    assert words in layouts(changed_plan(**LACKS[words]))[1]["tensor"]


def test_a_plan_that_leaves_a_layer_whole_names_the_line():
    why = layouts(changed_plan(without=["mixers.*.key"]))[1]["tensor"]
    assert why.startswith("cut by tensor_plan() for 2 ranks: RuntimeError")
    assert "own_module.py:" in why


class Scaled(nn.Linear):
    """A linear layer with one more number, which every rank has whole."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input):
        return super().forward(input) * self.scale


class WithScale(own_module.Full):
    says_so = True

    def __init__(self, keys):
        super().__init__(keys)
        self.mixers[1].up = Scaled(keys.width, 2 * keys.width)

    def tensor_plan(self):
        shared = {"mixers.*.up.scale": "replicated_with_grad_allreduce"} if self.says_so else {}
        return super().tensor_plan() | shared


def test_a_whole_parameter_among_cut_ones_is_named_in_the_plan():
    shares, unsplit = layouts(WithScale)
    assert not unsplit and "mixers.1.up.scale" not in shares
    why = layouts(type("Silent", (WithScale,), {"says_so": False}))[1]["tensor"]
    assert why.startswith("every rank has mixers.1.up.scale whole, and uses it for its own")


class Ranked(nn.Linear):
    """A linear layer that orders its outputs."""

    def forward(self, input):
        return super().forward(input).sort().values


class WithOrder(own_module.Full):
    def __init__(self, sizes):
        super().__init__(sizes)
        self.mixers[1].up = Ranked(sizes.width, 2 * sizes.width)


def test_an_operation_on_all_channels_is_not_cut():
    assert "sort works on (32,) in place of (64,)" in layouts(WithOrder)[1]["tensor"]


class Shared(own_module.Full):
    """Two blocks with one matrix."""

    def __init__(self, keys):
        super().__init__(keys)
        self.mixers[3].key.weight = self.mixers[1].key.weight


def test_a_weight_of_two_blocks_is_split_by_no_axis():
    unsplit = layouts(Shared, depth=4)[1]
    assert "mixers.1.key.weight, which is also mixers.3.key.weight" in unsplit["tensor"]
    assert unsplit["pipeline"] == "mixers.3.key.weight is also the weight of another part"


class PositionsFirst(own_module.Full):
    """Module whose first embedding is that of positions."""

    def __init__(self, keys):
        super().__init__(keys)
        tokens = self.tokens
        del self.tokens
        self.positions = nn.Embedding(1024, keys.width)
        self.tokens = tokens

    def forward(self, input_ids, position_ids):
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for mixer in self.mixers:
            hidden = mixer(hidden, position_ids == 0)
        return self.unembed(self.end(hidden))


def test_the_vocabulary_is_split_whichever_embedding_comes_first():
    shares = layouts(PositionsFirst)[0]
    assert shares["tokens.weight"] == shares["unembed.bias"] == 264
    assert "positions.weight" not in shares


class Tabled(own_module.Tied):
    """Module with an embedding in its last block."""

    def __init__(self, keys):
        super().__init__(keys)
        self.mixers[-1].table = nn.Embedding(8, keys.width)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_last_stage_has_the_tied_weight_and_saves_its_other_embeddings(tensor):
    model = ModuleModel.of(Tabled(own_module.Sizes(depth=4)), SHAPE)
    stages = (range(0, 2), range(2, 4))
    axes = SimpleNamespace(sequence_sharded_norms=False)
    config = SimpleNamespace(parallelism=axes)
    plan = SimpleNamespace(stages=stages, stages_of=lambda rank: (rank,), config=config)
    last, one = Axis(1, (0, 1), group=None), Axis(0, (0,), group=None)
    with other_ranks(2) as two:
        ranks = two if tensor == 2 else one
        mesh = SimpleNamespace(pipeline=last, expert=one, tensor=ranks)
        pieces = shard_skeleton(model, plan, mesh)
    tied = tied_weight(model, last)
    assert pieces[tied].name == "tokens.weight" and tied.shape == (264 // tensor, 32)
    saved = {piece.name: piece.is_saved_here for piece in pieces.values()}
    assert saved["mixers.3.table.weight"] and not saved["tokens.weight"]


class ScaledEmbedding(own_module.Full):
    def forward(self, input_ids, position_ids):
        hidden, begins = self.tokens(input_ids) * 4, position_ids == 0
        for mixer in self.mixers:
            hidden = mixer(hidden, begins)
        return self.unembed(self.end(hidden))


def test_stages_do_nothing_but_what_the_plan_lists():
    assert "do not compute what the whole module does" in layouts(ScaledEmbedding)[1]["pipeline"]


@pytest.mark.parametrize(
    "order, words",
    [
        (["tokens", "blocks", "end", "unembed"], "names blocks, which is no part of Other"),
        (["tokens", "end", "unembed"], "name the one nn.ModuleList"),
        (["tokens", "mixers", "unembed"], "end.weight is in none of the parts"),
        (["end", "tokens", "mixers", "unembed"], "do not compute what the whole module does"),
    ],
)
def test_what_a_pipeline_plan_lacks_is_said(order, words):
    other = type("Other", (own_module.Full,), {"pipeline_plan": lambda self: order})
    assert words in layouts(other)[1]["pipeline"]


TENSOR = {"parallelism__tensor": 2, "zero_stage__stage": 1}
STAGES = {"parallelism__pipeline": 2, "zero_stage__stage": 1}
STEPS, STOP = 6, 3


@pytest.mark.slow
def test_a_run_goes_on_exactly_and_on_another_layout(tmp_path):
    """Through a checkpoint at step 3, which knows no layout."""

    def plan_on(layout):
        return tiny_plan(module_config("full", steps=STEPS, **layout), 2)

    journeys = {
        "tensor": (TENSOR, TENSOR),
        "stages": (STAGES, STAGES),
        "tensor to ZeRO 3": (TENSOR, {"zero_stage__stage": 3}),
        "stages to tensor": (STAGES, TENSOR),
    }
    runs = {name: RunPaths(tmp_path / name) for name in journeys}
    whole = {"tensor": RunPaths(tmp_path / "1"), "stages": RunPaths(tmp_path / "2")}
    cases = [Case(with_stop(plan_on(journeys[n][0]), STOP), runs[n]) for n in journeys]
    cases += [Case(plan_on(journeys[name][0]), run) for name, run in whole.items()]
    train_cases(2, cases, together=True)
    cases = [Case(plan_on(journeys[name][1]), runs[name], attempt=2) for name in journeys]
    train_cases(2, cases, together=True)
    for name, run in runs.items():
        assert len(curve(run)) == STEPS
        assert Difference.between(curve(whole["tensor"]), curve(run)).within(limit(None)), name
    for name, run in whole.items():
        assert curve(runs[name]) == curve(run), name


@pytest.mark.slow
def test_a_tied_weight_is_one_on_every_layout(tmp_path):
    runs = {name: RunPaths(tmp_path / name) for name in ("one", "tensor", "stages")}
    for name, layout in zip(runs, ({}, TENSOR, STAGES), strict=True):
        config = module_config("tied", steps=STEPS, **{"zero_stage__stage": 0, **layout})
        ranks = 1 if name == "one" else 2
        train_cases(ranks, [Case(tiny_plan(config, ranks), runs[name])])
    for name in ("tensor", "stages"):
        assert Difference.between(curve(runs["one"]), curve(runs[name])).within(limit(None)), name


@pytest.mark.slow
def test_states_on_tensor_ranks_are_predicted_within_one_percent(tmp_path):
    small = {"zero_stage__reduce_bucket_size": 5_000}  # what is reduced last may outlive the step
    config = module_config("full", steps=2, arguments={"width": 128}, **TENSOR, **small)
    plan = tiny_plan(config, 2)
    (stage,) = pipeline_stages(plan.config.model, tensor=2)
    expected = resident_components(read_engine(plan), stage, 0).total
    case = Case(plan, RunPaths(tmp_path))
    for (found,) in train_cases(2, [case], probe="census_probe:resident"):
        assert found == pytest.approx(expected, rel=0.01)


def test_the_budget_gives_each_stage_its_parts():
    model = module_config("full").model
    for stage, blocks in zip(pipeline_stages(model, stage_blocks=(1, 3)), (1, 3), strict=True):
        built = skeleton(model, torch.float32)
        first = stage.first_block
        cut_to_stage(built, range(first, first + blocks), Axis(stage.index, (0, 1), group=None))
        assert stage.parameters == sum(each.numel() for each in built.parameters())
