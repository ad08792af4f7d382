"""Other architectures along the axes that may cut them: the curve of one process."""

import pytest
import torch
from architecture_cases import COLUMNS, PAIRS, directory, plan
from parity_cases import TOLERANCE, Difference
from rank_processes import Case, curve, train_cases

from trainctl.engines.process import Axis
from trainctl.memory.stages import stages_from_anatomy
from trainctl.models.anatomy import parse_anatomy
from trainctl.runs.layout import RunPaths
from trainctl.train.models.model import skeleton, whole_pieces
from trainctl.train.parallel.tensor import shard_model

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


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_experts_are_shared_out_by_their_width(kind, tmp_path):
    model = directory(tmp_path, kind)
    shapes = {piece.name: tuple(p.shape) for p, piece in on_rank(model, 0, 2).items()}
    experts = "model.layers.1.mlp.experts"
    inside = {"deepseek_v3": ((4, 32, 64), (4, 64, 16)), "gpt_oss": ((4, 64, 32), (4, 16, 64))}
    assert (shapes[f"{experts}.gate_up_proj"], shapes[f"{experts}.down_proj"]) == inside[kind]


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
