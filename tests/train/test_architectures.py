"""Directories of other architectures: trained from the weights that they have, and exported."""

import json

import pytest
import torch
from architecture_cases import COLUMNS, PAIRS
from architecture_cases import directory as shape_only
from architecture_cases import plan as plan_on
from parity_cases import TOLERANCE, Difference
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from trainctl.config.hf import fill_from_directory
from trainctl.config.schema import DataType, ModelConfig
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.evaluation import inference
from trainctl.train.export import export
from trainctl.train.loaded import load

STEPS, LR = 3, 1e-3
FEW = 6
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
}


def directory(folder, kind, changes):
    """A directory with weights, as transformers writes them."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **(SHAPE | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": [256, 3], "temperature": 0.6})
    )
    return fill_from_directory(ModelConfig(name="hf", family="hf", path=str(folder)))


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
    train_cases(2, list(cases.values()))
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
def test_an_axis_that_may_cut_an_architecture_gives_its_curve(tmp_path):
    """A few of the table's cells, in few steps; `scripts/architectures.py` trains them all."""
    models = {kind: shape_only(tmp_path / kind, kind) for kind, _ in PAIRS}
    alone = {
        kind: Case(plan_on(model, {}, steps=FEW), RunPaths(tmp_path / f"{kind}-alone"))
        for kind, model in models.items()
    }
    cut = {
        (kind, column): Case(
            plan_on(models[kind], COLUMNS[column], steps=FEW),
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
