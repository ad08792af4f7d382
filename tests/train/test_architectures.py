"""Directories of other architectures: trained from the weights that they have, and exported."""

import json
from copy import deepcopy

import pytest
import torch
from anatomies import read_directory
from architectures import made, of_directory
from rank_processes import Case, tiny_config, tiny_plan, train_cases
from safetensors.torch import load_file
from tensor_files import write_tensors
from transformers import AutoConfig, AutoModelForCausalLM

from trainctl.config.schema import DataType, ModelConfig
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import write_manifest
from trainctl.runs.records import read_events
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.evaluation import inference
from trainctl.train.export.directory import export
from trainctl.train.models.loaded import load

STEPS, LR = 3, 1e-3
SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 256,
    "pad_token_id": 1,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}

CASES = {
    "qwen2": ("qwen2", {}, {"zero_stage.stage": 3}),
    "phi3, tensor": ("phi3", {"vocab_size": 261}, {"parallelism.tensor": 2}),
    "olmo2": ("olmo2", {}, {"zero_stage.stage": 2}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 32}, {"parallelism.pipeline": 2}),
    "llama-3.1, tensor": ("llama", {"rope_parameters": ROPE}, {"parallelism.tensor": 2}),
    "llama-3.1, pipeline": ("llama", {"rope_parameters": ROPE}, {"parallelism.pipeline": 2}),
    "qwen3-moe": ("qwen3_moe", EXPERTS, {"zero_stage.stage": 3}),
    "qwen3-moe, tensor": (
        "qwen3_moe",
        EXPERTS,
        {"zero_stage.stage": 3, "parallelism.tensor": 2},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}, {"zero_stage.stage": 2}),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def directory(folder, kind, changes):
    """Write a directory with random weights by transformers and return its model section."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **(SHAPE | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": [256, 3], "temperature": 0.6})
    )
    return read_directory(ModelConfig(name="hf", family="hf", path=str(folder)))


def plan(model, settings):
    config = tiny_config(steps=STEPS, sequence_length=64)
    config.model, config.optimizer.lr = model, LR
    config.zero_stage.stage, config.precision.compute = 1, DataType.fp32
    for key, value in settings.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    return tiny_plan(config, 2)


@pytest.mark.slow
def test_other_architectures_start_from_their_weights_train_and_come_back(tmp_path):
    cases = {}
    for number, (name, (kind, changes, settings)) in enumerate(CASES.items()):
        model = directory(tmp_path / f"from-{number}", kind, changes)
        assert model.initial_weights == model.path == str(tmp_path / f"from-{number}")
        cases[name] = Case(plan(model, settings), RunPaths(tmp_path / f"run-{number}"))
    train_cases(2, list(cases.values()), together=True)
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    for number, (name, case) in enumerate(cases.items()):
        newest, _ = newest_checkpoint(case.run)
        out = tmp_path / f"out-{number}"
        export(case.plan.config, newest.path, out, dtype=torch.float32)
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        ours = load(case.plan, newest.path, "cpu", lambda *_: None)
        with inference(theirs), inference(ours.model):
            difference = (theirs(ids).logits - ours.model(ids).logits).abs().max()
        assert difference <= 2.5e-6, name
        before = AutoModelForCausalLM.from_pretrained(tmp_path / f"from-{number}")
        start = dict(before.named_parameters())
        for parameter, tensor in theirs.named_parameters():
            # A step of Adam moves an element by the learning rate at most: these are its weights.
            assert (tensor - start[parameter]).abs().max() < 1.5 * STEPS * LR, (name, parameter)
        losses = [e["loss"] for e in read_events(case.run.events) if e["event"] == "step"]
        assert len(losses) == STEPS and losses[-1] < losses[0], name
        settings = json.loads((out / "config.json").read_text())
        assert (settings["bos_token_id"], settings["eos_token_id"]) == (0, 256), name
        source = json.loads((tmp_path / f"from-{number}" / "generation_config.json").read_text())
        assert json.loads((out / "generation_config.json").read_text()) == source
        assert load_file(out / "model.safetensors"), name


@pytest.mark.slow
def test_a_router_s_bias_stays_in_fp32_through_training_checkpoints_and_a_resume(tmp_path):
    theirs = made("deepseek_v3")
    theirs.save_pretrained(tmp_path / "from")
    bias = theirs.state_dict()[BIAS]
    assert not torch.equal(bias, bias.bfloat16().float())
    cases = []
    for stage in (1, 3):
        settings = {
            "zero_stage.stage": stage,
            "precision.compute": DataType.bf16,
            "training.stop_after_steps": STEPS - 1,
            "training.global_batch_size": 4,
        }
        made_plan = plan(of_directory(tmp_path / "from", "deepseek_v3"), settings)
        cases.append(Case(made_plan, RunPaths(tmp_path / f"{stage}")))
    train_cases(2, cases, together=True)
    for stage, case in zip((1, 3), cases, strict=True):
        newest, _ = newest_checkpoint(case.run)
        saved = CheckpointReader(newest.path)
        assert torch.equal(saved.buffer(BIAS), bias)
        assert len(saved.manifest["buffers"]) == 1
        # As if training had moved it: the next attempt goes on from what the checkpoint has.
        (entry,) = saved.manifest["buffers"]
        tensors = load_file(newest.path / entry["file"])
        tensors[entry["key"]] = tensors[entry["key"]] + 0.25
        size, digest = write_over(newest.path / entry["file"], tensors)
        for file in saved.manifest["files"]:
            if file["name"] == entry["file"]:
                file.update(bytes=size, sha256=digest)
        write_manifest(newest.path, saved.manifest)
        longer = deepcopy(case.plan.config)
        longer.training.stop_after_steps = None
        cases[stage // 2] = Case(tiny_plan(longer, 2), case.run, attempt=2)
    train_cases(2, cases, together=True)
    for case in cases:
        newest, _ = newest_checkpoint(case.run)
        assert newest.step == STEPS
        assert torch.equal(CheckpointReader(newest.path).buffer(BIAS), bias + 0.25)


def write_over(path, tensors):
    path.unlink()
    return write_tensors(path, tensors)
