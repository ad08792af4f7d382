"""Other architectures along the axes that may cut them: the curve of one process."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from architecture_cases import ARCHITECTURES, COLUMNS, PAIRS, directory, plan
from parity_cases import TOLERANCE, Difference
from rank_processes import Case, curve, tiny_config, train_cases

from trainctl.engines.process import Axis
from trainctl.memory.stages import pipeline_stages, stages_from_anatomy
from trainctl.models.anatomy import parse_anatomy
from trainctl.plans.trainable import linear_layers
from trainctl.runs.layout import RunPaths
from trainctl.train.callbacks.recorder import TensorRecorder
from trainctl.train.models.model import skeleton, whole_pieces
from trainctl.train.parallel.shard_plan import shard_plan_of
from trainctl.train.parallel.tensor import shard_model, sum_partial_gradients

FEW = 4


def on_rank(model, index, size):
    """Return the pieces of the directory's model that tensor rank `index` of `size` holds."""
    built = skeleton(model, torch.float32)
    axis = Axis(index, tuple(range(size)), None)
    return shard_model(built, whole_pieces(built), axis, sequence_sharded_norms=False)


@pytest.mark.parametrize("kind", ["phi3", "olmo2", "gpt_neox", "starcoder2", "qwen3_moe"])
def test_a_rank_has_what_its_budget_counts(kind, tmp_path):
    model = directory(tmp_path, kind)
    pieces = on_rank(model, 1, 2)
    (stage,) = stages_from_anatomy(parse_anatomy(model.anatomy), tensor=2)
    assert sum(parameter.numel() for parameter in pieces) == stage.parameters
    whole = sum(piece.shape.numel() for piece in pieces.values())
    assert sum(parameter.numel() for parameter in pieces) < 0.6 * whole


@pytest.mark.parametrize("kind", ["llama", "olmo2", "qwen3_moe"])
def test_heads_that_are_fewer_than_the_ranks_are_on_several(kind, tmp_path):
    model = tiny_config().model if kind == "llama" else directory(tmp_path, kind)
    pieces = [on_rank(model, rank, 4) for rank in range(4)]  # with two key-value heads
    (stage,) = pipeline_stages(model, tensor=4)
    assert sum(parameter.numel() for parameter in pieces[3]) == stage.parameters
    keys = [
        p for each in pieces for p in each.values() if p.name.endswith("0.self_attn.k_proj.weight")
    ]
    assert [(p.gradient_parts, p.is_saved_here) for p in keys] == [(2, True), (2, False)] * 2
    assert keys[0].shard == keys[1].shard != keys[2].shard
    # A recording adds up what the ranks have of a layer's output.
    layer = torch.nn.Linear(1, 1)
    features = [TensorRecorder._features(None, layer, p, is_input=False)[1] for p in keys]
    assert torch.cat(features).tolist() == list(range(keys[0].shape[0]))


def test_shared_heads_have_their_group_where_they_are_frozen_too(monkeypatch):
    """NCCL splits a group off the group of all ranks, which all have to do together."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: made.append(tuple(ranks)))
    model = tiny_config().model
    pieces = on_rank(model, 3, 4)
    for parameter in pieces:
        parameter.requires_grad = False
    sum_partial_gradients(pieces, Axis(3, (0, 1, 2, 3), None), timedelta(seconds=1))
    assert made == [(2, 3)]


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_experts_are_shared_out_by_their_width(kind, tmp_path):
    model = directory(tmp_path, kind)
    shapes = {piece.name: tuple(p.shape) for p, piece in on_rank(model, 0, 2).items()}
    experts = "model.layers.1.mlp.experts"
    inside = {"deepseek_v3": ((4, 32, 64), (4, 64, 16)), "gpt_oss": ((4, 64, 32), (4, 16, 64))}
    assert (shapes[f"{experts}.gate_up_proj"], shapes[f"{experts}.down_proj"]) == inside[kind]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_plan_knows_how_each_linear_layer_is_split(kind, tmp_path):
    model = directory(tmp_path, kind)
    regions = shard_plan_of(skeleton(model, torch.float32)).regions
    rows = {f"{region.module}.{region.row}" for region in regions if not region.is_experts}
    columns = {f"{r.module}.{name}" for r in regions if not r.is_experts for name in r.columns}
    split = {each.name.split(".", 3)[-1]: each.split for each in linear_layers(model)}
    for how, names in (("inputs", rows), ("outputs", columns)):
        assert names & split.keys() == {name for name, found in split.items() if found == how}


def test_what_does_not_divide_is_refused_before_a_launch(tmp_path):
    model = directory(tmp_path, "deepseek_v3")  # its attention is not cut: only widths count
    (finding,) = plan(model, {"tensor": 3}, steps=1)
    assert finding.rule == "TC003"
    assert "tensor=3 does not divide the units of model.layers.1.mlp" in finding.message
    assert finding.hint == "parallelism.tensor=2 or 4"


def test_rotary_embeddings_that_look_at_the_length_are_not_shared_along_it(tmp_path):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    model = directory(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    (finding,) = plan(model, {"sequence": 2}, steps=1)
    assert finding.rule == "TC012" and "largest position" in finding.message
    assert not isinstance(plan(model, {"tensor": 2}, steps=1), tuple)


def test_attention_with_dropout_is_not_shared_along_the_sequence(tmp_path):
    model = directory(tmp_path, "phi3", attention_dropout=0.1)
    (finding,) = plan(model, {"context": 2}, steps=1)
    assert finding.rule == "TC522"


@pytest.mark.slow
def test_an_axis_that_may_cut_an_architecture_gives_its_curve(tmp_path):
    """This trains a few cells of the table for few steps; `scripts/architectures.py` trains them
    all.
    """
    models = {kind: directory(tmp_path / kind, kind) for kind, _ in PAIRS}
    alone = {
        kind: Case(plan(model, {}, steps=FEW), RunPaths(tmp_path / f"{kind}-alone"))
        for kind, model in models.items()
    }
    cut = {
        (kind, column): Case(
            plan(models[kind], COLUMNS[column], steps=FEW),
            RunPaths(tmp_path / f"{kind}-{column}"),
        )
        for kind, column in PAIRS
    }
    for world, cases in ((1, alone), (2, cut)):
        for refusals in train_cases(world, list(cases.values()), probe="architecture_probe:train"):
            assert not any(refusals), refusals
    for (kind, column), case in cut.items():
        reference, found = curve(alone[kind].run), curve(case.run)
        assert list(found) == list(reference) == list(range(1, FEW + 1))
        difference = Difference.between(reference, found)
        assert max(difference.loss, difference.norm) <= TOLERANCE, (kind, column)
