"""Checkpoints that Megatron-core's own code trained and saved continue here as they do there."""

from argparse import Namespace

import megatron_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_cases import configuration, continue_here
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints import megatron, source
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.weights import SeedWeights

LAYOUTS = (
    ("llama", 2, {"zero_stage__stage": 2}),
    ("qwen3", 1, {"zero_stage__stage": 0}),
    ("gpt2", 2, {"zero_stage__stage": 1, "parallelism__tensor": 2}),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return megatron_cases.train_there(tmp_path_factory.mktemp("megatron"))


@pytest.mark.slow
@pytest.mark.parametrize("family", megatron_cases.FAMILIES)
def test_logits_are_those_of_megatron(trained, family):
    opened = source.open_source(trained[family].folder)
    assert opened.format == "megatron"
    assert logits_difference(opened, configuration(family), trained[family].result) < 1e-5


@pytest.mark.slow
def test_runs_continue_as_megatron_does(trained, tmp_path):
    for continued in continue_here(tmp_path, trained, LAYOUTS):
        made = continued.imported
        assert (made.step, made.samples, made.tokens) == (3, 24, 1536)
        assert not [note for note in made.notes if "source trained" in note or "rate" in note]
        assert continued.difference < 1e-5


def logits_difference(opened, config, there):
    """Return the largest difference between logits here and there, of the first step's samples."""
    model = skeleton(config.model, torch.float32)
    weights = SeedWeights.of(config.model, model, 1)
    for parameter, piece in materialise(model, weights, torch.device("cpu")).items():
        values = opened.read(piece.name, "master", 0, parameter.numel())
        parameter.data.copy_(values.view(parameter.shape))
    with torch.no_grad():
        return (model(input_ids=there.ids).logits - there.logits).abs().max().item()


@pytest.mark.slow
def test_states_in_buckets_are_refused(trained):
    with pytest.raises(TrainctlError) as caught:
        source.open_source(trained["buckets"].folder)
    assert "dist-ckpt-optim-fully-reshardable" in caught.value.hint


def test_states_of_older_versions_are_read(tmp_path):
    """A model of two stacked layers as `fully_sharded_model_space` has it: two tensor ranks cut
    each state, and their parts lie one after the other.
    """
    folder = tmp_path / "iter_0000007"
    weights = {
        "embedding.word_embeddings.weight": (torch.rand(8, 4), 0),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (torch.rand(2, 4), None),
        "decoder.layers.self_attention.linear_qkv.weight": (torch.rand(2, 12, 4), 1),
        "decoder.layers.self_attention.linear_proj.weight": (torch.rand(2, 4, 4), 2),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (torch.rand(2, 4), None),
        "decoder.layers.mlp.linear_fc1.weight": (torch.rand(2, 12, 4), 1),
        "decoder.layers.mlp.linear_fc2.weight": (torch.rand(2, 4, 6), 2),
        "decoder.final_layernorm.weight": (torch.rand(4), None),
    }
    state = {key: whole.bfloat16() for key, (whole, _) in weights.items()}
    states = {"fp32_param": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}
    for key, (whole, axis) in weights.items():
        parts = fragments(whole, axis, is_stacked="layers" in key)
        state |= {f"optimizer.state.{name}.{key}": parts * by for name, by in states.items()}
    groups = {"optimizer": {"param_groups": [{"lr": 0.5, "step": 6}]}}
    state["optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"] = [groups]
    whole = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=folder, planner=whole, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    arguments = Namespace(num_attention_heads=2, num_query_groups=1, consumed_train_samples=70)
    torch.save({"iteration": 7, "args": arguments}, folder / "common.pt")
    opened = megatron.open_source(folder)
    assert (opened.scalars, opened.progress.learning_rate) == ({"step": 6.0}, 0.5)
    assert (opened.progress.samples, opened.progress.tokens) == (70, None)
    qkv = weights["decoder.layers.self_attention.linear_qkv.weight"][0]
    up = weights["decoder.layers.mlp.linear_fc1.weight"][0][1, 6:]
    output = weights["decoder.layers.self_attention.linear_proj.weight"][0]
    for state, by in (("master", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
        for name, expected in (
            ("layers.0.self_attn.q_proj", qkv[0, :6]),
            ("layers.1.self_attn.k_proj", qkv[1, 6:9]),
            ("layers.1.mlp.up_proj", up),
            ("layers.0.self_attn.o_proj", output[0]),
            ("norm", weights["decoder.final_layernorm.weight"][0]),
        ):
            read = opened.read(f"model.{name}.weight", state, 0, expected.numel())
            assert torch.equal(read, (expected * by).flatten()), (name, state)
            assert torch.equal(opened.read(f"model.{name}.weight", state, 1, 3), read[1:3])


def test_what_is_not_whole_or_of_another_kind_is_refused(tmp_path):
    folder = tmp_path / "iter_0000007"
    dcp.save(
        {"decoder.layers.mlp.router.weight": torch.rand(2, 4)}, checkpoint_id=folder, no_dist=True
    )
    (tmp_path / megatron.TRACKER).write_text("8\n")
    assert source.detect(tmp_path) == "megatron"
    with pytest.raises(TrainctlError, match="iter_0000008"):
        megatron.open_source(tmp_path)
    (tmp_path / megatron.TRACKER).write_text("7\n")
    with pytest.raises(TrainctlError, match="torch_dist") as caught:
        megatron.open_source(tmp_path)
    assert "--ckpt-convert-format" in caught.value.hint
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    heads = {"num_attention_heads": 2}
    for common, said in (
        (None, r"common\.pt: it is missing"),
        ({"args": 1}, "no iteration"),
        ({"iteration": 7}, "no arguments"),
        ({"iteration": 7, "args": Namespace(apply_layernorm_1p=True, **heads)}, "layernorm_1p"),
        ({"iteration": 7, "args": Namespace(**heads)}, r"mlp\.router\.weight is of no decoder"),
    ):
        if common is not None:
            torch.save(common, folder / "common.pt")
        with pytest.raises(TrainctlError, match=said):
            megatron.open_source(tmp_path)


def fragments(whole, axis, *, is_stacked):
    """Return a tensor as (fragments of each axis, elements of a fragment)."""
    counts = [2 if at == axis or (is_stacked and at == 0) else 1 for at in range(whole.dim())]
    sizes = [size // count for size, count in zip(whole.shape, counts, strict=True)]
    cut = whole.view([n for pair in zip(counts, sizes, strict=True) for n in pair])
    order = [*range(0, cut.dim(), 2), *range(1, cut.dim(), 2)]
    return cut.permute(order).reshape(*counts, -1)
