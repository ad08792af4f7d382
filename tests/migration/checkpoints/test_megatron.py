"""Checkpoints that Megatron-core's own code trained and saved continue here as they do there."""

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fork_server import ForkServer
from rank_processes import (
    ENVIRONMENT,
    Case,
    curve,
    prepare_once,
    tiny_config,
    tiny_plan,
    train_cases,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from trainctl.config.registry import new_section
from trainctl.config.schema import ModelConfig
from trainctl.data.corpora import load_corpora
from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints import megatron, source
from trainctl.migration.checkpoints.write import import_source
from trainctl.plans.types import Batch
from trainctl.runs.layout import RunPaths
from trainctl.train.data import TrainingData
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.weights import SeedWeights

STEPS, SAVE_AT, BATCH, TOKENS, ROWS = 6, 3, 8, 64, 384
FAMILIES = {
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True},
    "gpt2": {"family": "gpt2", "tie_word_embeddings": True, "num_key_value_heads": None},
}


def configuration(family, **changes):
    """Return the configuration of what `megatron_model` trains."""
    config = tiny_config(
        steps=STEPS, sequence_length=TOKENS, evaluation_samples=0, sample_tokens=0, **changes
    )
    config.model = ModelConfig(
        vocab_size=ROWS,
        hidden_size=32,
        intermediate_size=128 if family == "gpt2" else 48,
        num_layers=2,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=TOKENS,
        norm_epsilon=1e-5,
        **{"num_key_value_heads": 2, **FAMILIES[family]},
    )
    config.optimizer.lr = 1e-3
    config.optimizer.weight_decay = 0.0
    config.optimizer.gradient_clipping = 1.0
    config.schedule = new_section("schedule", "constant", warmup_steps=0)
    config.checkpoint.at_end = False
    return config


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Return a file of the samples of all steps in their order, with the token after each."""
    folder = tmp_path_factory.mktemp("samples")
    plan, run = tiny_plan(configuration("llama"), 1), RunPaths(folder)
    run.attempt(1).root.mkdir(parents=True)
    prepare_once(plan, run)
    corpora = load_corpora(run.corpus, plan.config.data)
    data = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    whole = Batch(
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        gradient_accumulation_steps=1,
        sequence_length=TOKENS,
    )
    batches = [data.step(step * BATCH, whole)[0] for step in range(STEPS)]
    ids = [torch.cat([each.input_ids, each.labels[:, -1:]], dim=1) for each in batches]
    np.save(folder / "samples.npy", torch.cat(ids).numpy())
    return folder / "samples.npy"


@pytest.fixture(scope="module")
def trained(samples, tmp_path_factory):
    """Return what Megatron-core trained and saved on two processes, by name: folder and result."""
    from megatron_model import MegatronCase

    folder = tmp_path_factory.mktemp("megatron")
    base = MegatronCase(folder=folder, samples=samples, steps=STEPS, save_at=SAVE_AT, batch=BATCH)
    cases = {
        "llama": replace(base, tensor=2),
        "qwen3": replace(base, qk_norms=True, is_tied=True, sharding=None),
        "gpt2": replace(base, is_gpt2=True, is_tied=True, numbered=True),
        "buckets": replace(base, sharding="dp_reshardable", steps=SAVE_AT),
    }
    cases = {name: replace(case, folder=folder / name) for name, case in cases.items()}
    with ForkServer(("megatron_model",), {**ENVIRONMENT, "PYTHONWARNINGS": "ignore"}) as server:
        results = server.run("megatron_model:train", list(cases.values()), 2, 200)[0]
    return {
        name: (case.folder, result)
        for (name, case), result in zip(cases.items(), results, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "processes"),
    [
        ("llama", {"zero_stage__stage": 2}, 2),
        ("qwen3", {"zero_stage__stage": 0}, 1),
        ("gpt2", {"zero_stage__stage": 1, "parallelism__tensor": 2}, 2),
    ],
)
def test_a_run_continues_as_megatron_does(trained, tmp_path, family, layout, processes):
    folder, there = trained[family]
    opened = source.open_source(folder)
    assert opened.format == "megatron"
    assert logits_difference(opened, configuration(family), there) < 1e-5
    plan = tiny_plan(configuration(family, **layout), processes)
    imported = import_source(opened, plan, tmp_path / "run")
    assert (imported.step, imported.samples, imported.tokens) == (3, 24, 1536)
    assert not [note for note in imported.notes if "source trained" in note or "rate" in note]
    train_cases(processes, [Case(plan, RunPaths(tmp_path / "run"), attempt=2)])
    here = curve(RunPaths(tmp_path / "run"))
    assert list(here) == [4, 5, 6]
    assert max(abs(here[step][0] - there.losses[step]) for step in here) < 1e-5


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
        source.open_source(trained["buckets"][0])
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


def fragments(whole, axis, *, is_stacked):
    """Return a tensor as (fragments of each axis, elements of a fragment)."""
    counts = [2 if at == axis or (is_stacked and at == 0) else 1 for at in range(whole.dim())]
    sizes = [size // count for size, count in zip(whole.shape, counts, strict=True)]
    cut = whole.view([n for pair in zip(counts, sizes, strict=True) for n in pair])
    order = [*range(0, cut.dim(), 2), *range(1, cut.dim(), 2)]
    return cut.permute(order).reshape(*counts, -1)
