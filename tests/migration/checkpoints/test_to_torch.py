"""Exports with optimizer states hold what the checkpoint holds, in the form that torch reads."""

import json
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_journeys import config_of_run
from rank_processes import tiny_plan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from transformers import AutoModelForCausalLM, TrainerState

from trainctl.config.registry import new_section
from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints.source import open_source
from trainctl.migration.checkpoints.to_torch import check_dcp, check_trainer, export_dcp
from trainctl.migration.checkpoints.trainer import export_trainer, trainer_groups
from trainctl.migration.checkpoints.write import import_source
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.directory import new_attempt
from trainctl.runs.layout import RunPaths
from trainctl.train.models.model import transformers_config

STEP = 4


def build(config, *, seed):
    """Return a model and AdamW in the Trainer's groups, after updates by random gradients."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(transformers_config(config.model), dtype=torch.float32)
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name] for name in names]} for names in trainer_groups(model)]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    for _ in range(STEP):
        for each in parameters.values():
            each.grad = torch.randn_like(each)
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a run with an imported checkpoint, and the model and the optimizer in it."""
    folder = tmp_path_factory.mktemp("made")
    config = config_of_run()
    model, optimizer = build(config, seed=1)
    out = folder / "out"
    model.save_pretrained(out)
    torch.save(optimizer.state_dict(), out / "optimizer.pt")
    (out / "trainer_state.json").write_text(json.dumps(asdict(TrainerState(global_step=STEP))))
    plan, run = tiny_plan(config, 2), RunPaths(folder / "run")
    import_source(open_source(out), plan, run.root)
    if not effective_attempt(run).number:
        new_attempt(run, plan)
    return config, run.checkpoints / f"step-{STEP:08d}", model, optimizer


def assert_equal_states(model, optimizer, expected_model, expected):
    for (name, parameter), wanted in zip(
        model.named_parameters(), expected_model.parameters(), strict=True
    ):
        assert torch.equal(parameter, wanted), name
        for state in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][state], expected.state[wanted][state])


@pytest.mark.parametrize("flat", [False, True])
def test_torch_loads_the_distributed_checkpoint(tmp_path, made, flat):
    config, checkpoint, model, optimizer = made
    out = tmp_path / "out"
    exported = export_dcp(config, checkpoint, out)
    assert exported.files == sorted(path.name for path in out.iterdir())
    other, loaded = build(config, seed=2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(other, loaded, options=options)
    assert "lm_head.weight" in weights  # tied, and asked for under both names
    trainer = {"step": 0, "samples": 0, "tokens": 0}
    content = {"model": weights, "optimizer": states, "trainer": trainer}
    dcp.load(content, checkpoint_id=str(out), no_dist=True)
    set_state_dict(
        other, loaded, model_state_dict=weights, optim_state_dict=states, options=options
    )
    assert_equal_states(other, loaded, model, optimizer)
    assert content["trainer"]["step"] == STEP
    rates = [(group["lr"], group["weight_decay"]) for group in loaded.param_groups]
    assert rates == [(1e-3, 0.1), (1e-3, 0.0)]


def test_a_tied_weight_is_stored_once(tmp_path, made):
    config, checkpoint, *_ = made
    export_dcp(config, checkpoint, tmp_path / "out")
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    assert places["model.lm_head.weight"] == places["model.model.embed_tokens.weight"]


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_the_trainers_optimizer(tmp_path, made, mmap):
    config, checkpoint, model, optimizer = made
    export_trainer(config, checkpoint, tmp_path / "out")
    other, loaded = build(config, seed=2)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    parameters = dict(other.named_parameters())
    groups = [{"params": [parameters[name] for name in names]} for names in trainer_groups(other)]
    loaded = torch.optim.AdamW(groups, lr=0.5)
    content = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True, mmap=mmap)
    loaded.load_state_dict(content)
    assert_equal_states(other, loaded, model, optimizer)
    assert [group["initial_lr"] for group in loaded.param_groups] == [1e-3, 1e-3]
    assert [group["weight_decay"] for group in loaded.param_groups] == [0.1, 0.0]
    scheduler = torch.load(tmp_path / "out" / "scheduler.pt", weights_only=True)
    assert (scheduler["last_epoch"], scheduler["_last_lr"]) == (STEP, [1e-3, 1e-3])
    state = TrainerState.load_from_json(str(tmp_path / "out" / "trainer_state.json"))
    assert state.global_step == STEP


@pytest.mark.parametrize("export", [export_dcp, export_trainer])
def test_an_import_of_an_export_is_the_same_checkpoint(tmp_path, made, export):
    config, checkpoint, model, optimizer = made
    export(config, checkpoint, tmp_path / "out")
    source = open_source(tmp_path / "out")
    source.use_model(model)
    for name, parameter in model.named_parameters():
        expected = {"master": parameter, **optimizer.state[parameter]}
        for state in source.states:
            found = source.read(name, state, 0, parameter.numel())
            assert torch.equal(found, expected[state].detach().view(-1)), (name, state)
    source.verify()
    assert (source.progress.step, source.scalars) == (STEP, {"step": float(STEP)})


@pytest.mark.parametrize("export", [export_dcp, export_trainer])
def test_optimizers_that_torch_lacks_are_refused(tmp_path, made, export):
    config, checkpoint, *_ = made
    other = replace(config, optimizer=new_section("optimizer", "lion"))
    with pytest.raises(TrainctlError, match="optimizer=lion is none"):
        export(other, checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_that_the_trainer_does_not_have_are_noted(tmp_path, made):
    config, checkpoint, *_ = made
    other = replace(config, optimizer=replace(config.optimizer, decay_embeddings=False))
    exported = export_trainer(other, checkpoint, tmp_path / "out")
    assert any("model.embed_tokens.weight" in note for note in exported.notes)


@pytest.mark.parametrize(
    ("export", "check"), [(export_dcp, check_dcp), (export_trainer, check_trainer)]
)
def test_a_check_compares_the_model_and_every_state(tmp_path, made, export, check):
    config, checkpoint, model, _ = made
    export(config, checkpoint, tmp_path / "out")
    checked = check(config, checkpoint, tmp_path / "out")
    assert checked.differences == [] and checked.scores > 1000
    assert checked.states == 3 * sum(each.numel() for each in model.parameters())
    if export is export_trainer:
        file = tmp_path / "out" / "optimizer.pt"
        content = torch.load(file, weights_only=True)
        content["state"][2]["exp_avg"].view(-1)[-1] += 1e-3
        torch.save(content, file)
        (said,) = check(config, checkpoint, tmp_path / "out").differences
        assert " (exp_avg) differs from the checkpoint's" in said and "more" not in said
