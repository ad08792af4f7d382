"""Folders of the Trainer and of accelerate are read in each form, or the fault is named."""

import json
import re
from copy import deepcopy
from dataclasses import asdict
from math import prod

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainerState, TrainingArguments

from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints.source import detect, open_source


@pytest.fixture(scope="module")
def trained():
    """Return a tiny model after an update, and its optimizer."""
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=40,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.9, 0.95))
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    optimizer.step()
    return model, optimizer


def save_trainer(folder, trained, *, step=1, shard_size="5GB"):
    """Save as the Trainer does."""
    model, optimizer = trained
    folder.mkdir(parents=True)
    model.save_pretrained(folder, max_shard_size=shard_size)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    arguments = TrainingArguments(str(folder), gradient_accumulation_steps=3, use_cpu=True)
    torch.save(arguments, folder / "training_args.bin")
    state = TrainerState(global_step=step, num_input_tokens_seen=96, train_batch_size=2)
    (folder / "trainer_state.json").write_text(json.dumps(asdict(state)))
    for rank in range(4):
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    return folder


def read_all(source, model):
    """Return each state of each parameter, read as an import reads it."""
    source.use_model(model)
    found = {}
    for name, shape in source.shapes.items():
        for state in source.states:
            starts = range(0, prod(shape), 50)
            parts = [source.read(name, state, a, min(a + 50, prod(shape))) for a in starts]
            found[name, state] = torch.cat(parts)
    source.verify()
    return found


def assert_holds(source, trained):
    model, optimizer = trained
    found = read_all(source, model)
    assert list(source.shapes) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        states = optimizer.state[parameter]
        expected = {"master": parameter, **states}
        for state in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[name, state], expected[state].detach().view(-1)), name
    assert source.scalars == {"step": 1.0}
    assert source.progress.learning_rate == 0.25


@pytest.mark.parametrize("shard_size", ["5GB", "3kB"])
def test_the_newest_checkpoint_of_the_trainer(tmp_path, trained, shard_size):
    save_trainer(tmp_path / "checkpoint-9", trained, step=9)
    newest = save_trainer(tmp_path / "checkpoint-10", trained, step=10, shard_size=shard_size)
    assert detect(tmp_path) == "trainer"
    source = open_source(tmp_path)
    assert (source.format, source.path) == ("trainer", newest)
    assert_holds(source, trained)
    known = source.progress
    assert (known.step, known.samples, known.tokens) == (10, 10 * 2 * 3 * 4, 96)
    assert any("random states" in note for note in source.notes)


def test_what_the_trainer_does_not_say_is_unknown(tmp_path, trained):
    folder = save_trainer(tmp_path / "out", trained)
    (folder / "training_args.bin").unlink()
    source = open_source(folder)
    assert source.progress.samples is None
    assert any("training_args.bin" in note for note in source.notes)


def test_weights_in_16_bits_are_noted(tmp_path, trained):
    model, optimizer = trained
    folder = save_trainer(tmp_path / "out", (deepcopy(model).bfloat16(), optimizer))
    source = open_source(folder)
    found = read_all(source, model)
    name, parameter = next(iter(model.named_parameters()))
    assert torch.equal(found[name, "master"], parameter.detach().bfloat16().float().view(-1))
    assert any("bfloat16" in note for note in source.notes)


def test_a_lost_pointer_to_deepspeeds_folder_is_named(tmp_path, trained):
    folder = save_trainer(tmp_path / "checkpoint-1", trained)
    (folder / "global_step1").mkdir()  # as beside a universal checkpoint, which goes unread
    assert_holds(open_source(folder), trained)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(TrainctlError, match="latest"):
        open_source(folder)


def test_an_adapter_is_no_model(tmp_path, trained):
    torch.save(trained[1].state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TrainctlError, match="adapter"):
        open_source(tmp_path)


def test_state_of_accelerate(tmp_path, trained):
    """`save_state` keeps neither configuration nor progress."""
    model, optimizer = trained
    save_file(
        {name: each.detach() for name, each in model.named_parameters()},
        tmp_path / "model.safetensors",
    )
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    source = open_source(tmp_path)
    assert_holds(source, trained)
    assert source.progress.step is None


def named_states(trained):
    model, optimizer = trained
    names = {each: name for name, each in model.named_parameters()}
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": list(names.values())}]
    state = {names[each]: states for each, states in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def test_full_state_dicts_of_fsdp(tmp_path, trained):
    torch.save(trained[0].state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    torch.save(named_states(trained), tmp_path / "optimizer.bin")
    assert_holds(open_source(tmp_path), trained)


def test_sharded_state_dicts_of_fsdp(tmp_path, trained):
    for name, content in (
        ("pytorch_model_fsdp_0", {"model": trained[0].state_dict()}),
        ("optimizer_0", {"optimizer": named_states(trained)}),
    ):
        (tmp_path / name).mkdir()
        dcp.save(content, checkpoint_id=str(tmp_path / name), no_dist=True)
    (tmp_path / "trainer_state.json").write_text(json.dumps(asdict(TrainerState(global_step=1))))
    source = open_source(tmp_path)
    assert_holds(source, trained)
    assert source.progress.step == 1


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-10])


def flip(file):
    """Change a byte of the first tensor."""
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


FAULTS = {
    "a weight file is missing": lambda f: next(f.glob("model-00002*")).unlink(),
    "a weight file is truncated": lambda f: cut_short(next(f.glob("model-00002*"))),
    "the optimizer is truncated": lambda f: cut_short(f / "optimizer.pt"),
    "the optimizer is damaged": lambda f: flip(f / "optimizer.pt"),
    "the state is damaged": lambda f: cut_short(f / "trainer_state.json"),
    "there are no weights": lambda f: [file.unlink() for file in f.glob("model*")],
}
NAMED = {
    "a weight file is missing": r"model-00002\S*",
    "a weight file is truncated": r"model-00002\S*",
    "the optimizer is truncated": r"optimizer\.pt",
    "the optimizer is damaged": r"optimizer\.pt",
    "the state is damaged": r"trainer_state\.json",
    "there are no weights": "no weights",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_or_partial_folder_is_refused(tmp_path, trained, fault):
    folder = save_trainer(tmp_path / "checkpoint-1", trained, shard_size="3kB")
    FAULTS[fault](folder)
    with pytest.raises(TrainctlError) as caught:
        read_all(open_source(folder), trained[0])
    assert re.search(NAMED[fault], caught.value.message), caught.value.message
    assert caught.value.exit_code == 5


def test_weights_of_another_model_are_left_to_be_refused(tmp_path, trained):
    folder = save_trainer(tmp_path / "checkpoint-1", trained)
    small = LlamaForCausalLM(LlamaConfig(**{**trained[0].config.to_dict(), "num_hidden_layers": 1}))
    with pytest.raises(TrainctlError, match="does not follow"):
        open_source(folder).use_model(small)
    (folder / "optimizer.pt").unlink()
    source = open_source(folder)
    source.use_model(small)
    assert "model.layers.1.mlp.up_proj.weight" in source.shapes
