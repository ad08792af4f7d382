"""An import makes a whole checkpoint or nothing, and says what is unknown or differs."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import architectures
import deepspeed_files
import pytest
import torch
from deepspeed_files import STATES, values_of
from rank_processes import tiny_config, tiny_plan

import trainctl
from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints import write
from trainctl.migration.checkpoints.source import open_source
from trainctl.plans.shapes import all_tensors
from trainctl.plans.types import RunPlan
from trainctl.runs import checkpoints
from trainctl.runs.directory import create_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import verify
from trainctl.train.checkpoint.content import CheckpointReader


def plan(**keys: Any) -> RunPlan:
    settings = {"optimizer__lr": 1e-3, "schedule__kind": "constant", "steps": 20, **keys}
    return tiny_plan(tiny_config(**settings), 1)


def shapes_of(made: RunPlan, prefix: str = "") -> list[dict[str, list[int]]]:
    tensors = all_tensors(made.config.model)
    return [{f"{prefix}{tensor.name}": list(tensor.shape) for tensor in tensors}]


def imported(
    tmp_path: Path, made: RunPlan, *, prefix: str = "", **settings: Any
) -> write.ImportedCheckpoint:
    source = tmp_path / "source"
    shapes = shapes_of(made, prefix)
    deepspeed_files.save(source, shapes, **{"stage": 3, "ranks": 2, **settings})
    return write.import_source(open_source(source), made, tmp_path / "run")


@pytest.mark.parametrize("prefix", ["", "module.", "wrapper._orig_mod."])
def test_the_checkpoint_has_every_element_under_the_models_names(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "PIECE", 1000)
    monkeypatch.setattr(write, "FILE_BYTES", 300_000)
    made = plan()
    result = imported(tmp_path, made, prefix=prefix)
    run = RunPaths(Path(result.run))
    ((path, info),) = [(info.path, info) for info in checkpoints.list_checkpoints(run)]
    assert (result.step, info.step, result.samples, result.tokens) == (7, 7, 56, 56 * 128)
    assert verify(path, checkpoints.manifest_run_id(run)) == []
    reader = CheckpointReader(path)
    reader.check(made.config.model, {t.name: list(t.shape) for t in all_tensors(made.config.model)})
    reader.check_states(set(STATES))
    assert len(reader.manifest["files"]) > 2
    for tensor in all_tensors(made.config.model):
        for state in ("master", *STATES):
            values = reader.read_state(tensor.name, state, 0, tensor.numel)
            there = values_of(prefix + tensor.name, tensor.shape, state.replace("master", "fp32"))
            assert torch.equal(values, there.view(-1)), tensor.name
    assert reader.manifest["scalars"] == {"step": 7.0}
    assert not any("learning rate" in note or "optimizer." in note for note in result.notes)


def test_what_differs_is_said_with_both_values(tmp_path: Path) -> None:
    made = plan(optimizer__beta2=0.99, optimizer__weight_decay=0.3, optimizer__lr=2e-3, steps=5)
    notes = "\n".join(imported(tmp_path, made, global_samples=60).notes)
    assert "optimizer.beta2=0.99, and the source trained with 0.95" in notes
    assert "optimizer.weight_decay=0.3, and the source trained with 0.1" in notes
    assert "learning rate of step 8 is 0.002" in notes and "the source was at 0.001" in notes
    assert "60 samples in 7 steps; this configuration's batches have 56" in notes
    assert "ends after 5" in notes


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"model__num_layers": 3}, r"lacks model\.layers\.2"),
        ({"model__num_layers": 1}, r"the model has no model\.layers\.1"),
        ({"model__intermediate_size": 128}, r"has shape \[64, 176\], the model's is \[64, 128\]"),
        ({"model__tie_word_embeddings": False}, r"lacks lm_head\.weight"),
        ({"optimizer__kind": "lion"}, "optimizer=lion has exp_avg|exp_avg_sq"),
        ({"training__freeze": ["embeddings"]}, "is frozen in this run"),
    ],
)
def test_another_model_or_optimizer_is_refused_and_nothing_is_made(
    tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    deepspeed_files.save(tmp_path / "source", shapes_of(plan()), stage=1, ranks=1)
    with pytest.raises(TrainctlError, match=problem):
        write.import_source(open_source(tmp_path / "source"), plan(**keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_whose_buffer_would_be_lost_is_refused(tmp_path: Path) -> None:
    """The bias by which a router chooses experts is no parameter."""
    architectures.made("deepseek_v3").save_pretrained(tmp_path / "model")
    config = tiny_config(steps=20)
    config.model = architectures.of_directory(tmp_path / "model", "deepseek_v3")
    deepspeed_files.save(tmp_path / "source", shapes_of(plan()), stage=3, ranks=2)
    with pytest.raises(TrainctlError, match="e_score_correction_bias, and no import reads it"):
        source = open_source(tmp_path / "source")
        write.import_source(source, tiny_plan(config, 1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_parameters_that_the_source_did_not_train_are_named(tmp_path: Path) -> None:
    made = plan()
    (shapes,) = shapes_of(made)
    name = "model.norm.weight"
    frozen = {name: torch.rand(shapes[name])}
    shapes = [{n: s for n, s in shapes.items() if n != name}]
    deepspeed_files.save(tmp_path / "source", shapes, stage=3, ranks=2, frozen=frozen)
    with pytest.raises(TrainctlError, match=r"did not train model\.norm\.weight"):
        write.import_source(open_source(tmp_path / "source"), made, tmp_path / "run")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_weights_are_those_that_the_run_starts_from(tmp_path: Path, stage: int) -> None:
    """ZeRO 1 does not list them: they are in the weights alone."""
    made = plan(training__freeze=["model.norm.weight"])
    (shapes,) = shapes_of(made)
    norm = torch.ones(shapes.pop("model.norm.weight"))
    settings: dict[str, Any] = {"frozen": {"model.norm.weight": norm}}
    if stage == 1:
        settings = {"module": {"model.norm.weight": norm.bfloat16()}}
    deepspeed_files.save(tmp_path / "source", [shapes], stage=stage, ranks=2, **settings)
    result = write.import_source(open_source(tmp_path / "source"), made, tmp_path / "run")
    manifest = CheckpointReader(Path(result.run) / "checkpoints" / result.checkpoint).manifest
    assert "model.norm.weight" not in manifest["shapes"]
    assert manifest["base"]["kind"] == "seed"


@pytest.mark.parametrize("is_equal", [True, False])
def test_two_tensors_of_a_tied_weight_must_be_equal(tmp_path: Path, is_equal: bool) -> None:
    made = plan()
    (shapes,) = shapes_of(made)
    embedding = torch.rand(shapes["model.embed_tokens.weight"])
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    if not is_equal:
        both["lm_head.weight"][3, 2] += 1
    source = open_source(_with(tmp_path / "source", shapes, both))
    if is_equal:
        write.import_source(source, made, tmp_path / "run")
    else:
        with pytest.raises(TrainctlError, match="differ, and the model has one weight"):
            write.import_source(source, made, tmp_path / "run")


def _with(folder: Path, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any]) -> Path:
    """Save a universal checkpoint, some of whose weights have given values."""
    place = folder / "zero"
    for name, shape in {**shapes, **{n: list(v.shape) for n, v in values.items()}}.items():
        (place / name).mkdir(parents=True)
        for state in ("fp32", *STATES):
            tensor = values.get(name, values_of(name, shape, state))
            torch.save({"param": tensor}, place / name / f"{state}.pt")
        torch.save(torch.tensor(3.0), place / name / "step.pt")
    return folder


def test_weights_alone_begin_with_no_optimizer_states(tmp_path: Path) -> None:
    made = plan()
    (shapes,) = shapes_of(made)
    folder = _with(tmp_path / "source", shapes, {})
    for file in (*folder.rglob("exp_avg*.pt"),):
        file.unlink()
    result = write.import_source(open_source(folder), made, tmp_path / "run")
    reader = CheckpointReader(Path(result.run) / "checkpoints" / result.checkpoint)
    assert (result.states, reader.was_updated, result.step) == (["master"], False, 3)
    assert any("no optimizer states" in note for note in result.notes)


def test_a_failure_on_the_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan()
    deepspeed_files.save(tmp_path / "source", shapes_of(made), stage=3, ranks=2)
    source = open_source(tmp_path / "source")
    file = next((tmp_path / "source").rglob("zero_pp_rank_1_*_optim_states.pt"))
    file.write_bytes(file.read_bytes()[:200_000])
    with pytest.raises(TrainctlError, match=file.name):
        write.import_source(source, made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_with_checkpoints_takes_no_other(tmp_path: Path) -> None:
    """An import that was killed behind its commit is completed, and told to be whole."""
    made = plan()
    imported(tmp_path, made)
    run = RunPaths(tmp_path / "run")
    shutil.rmtree(run.attempt(1).root)
    with pytest.raises(TrainctlError, match=r"already, and step-00000007 is whole") as caught:
        write.import_source(open_source(tmp_path / "source"), made, tmp_path / "run")
    assert f"trainctl resume {run.root}" in caught.value.hint
    assert run.attempt(1).plan.is_file()


def test_a_killed_import_is_begun_again(tmp_path: Path) -> None:
    made = plan()
    run = create_run(made.config, run_dir=tmp_path / "run")
    left = checkpoints.temporary_path(run, 7)
    left.mkdir()
    (left / "imported-00000.safetensors").write_bytes(b"half")
    assert imported(tmp_path, made).step == 7
    assert [path.name for path in run.checkpoints.iterdir() if path.is_dir()] == ["step-00000007"]


@pytest.mark.slow
def test_the_command_imports_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainctl.cli.main import run as trainctl_command

    monkeypatch.chdir(tmp_path)
    overrides = ("recipe=tiny", "training.steps=20", "precision=fp32")
    made = trainctl.plan(*overrides).details.plan
    deepspeed_files.save(tmp_path / "source", shapes_of(made), stage=2, ranks=2)
    assert trainctl_command(["checkpoint", "import", "source", "--to", "run", *overrides]) == 0
    run = trainctl.Run("run")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [7]
    assert run.checkpoints[0].verify() == []
    exported = run.checkpoint().export("back", to="deepspeed-universal", check=True)
    assert exported["check"]["equal"] and exported["check"]["states"] > 1000
    assert (tmp_path / "back" / "latest_universal").read_text() == "global_step7", exported
    create_run(made.config, run_dir=tmp_path / "again")  # and stopped before its first save
    again = trainctl.api.import_checkpoint("source", "again", *overrides, format="deepspeed")
    assert json.loads(json.dumps(again))["step"] == 7
    with pytest.raises(TrainctlError, match="step-00000007 is whole"):
        trainctl.api.import_checkpoint("source", "run", *overrides)
    with pytest.raises(TrainctlError, match=r"is a run, which .*: training\.steps is another"):
        trainctl.api.import_checkpoint("source", "run", *overrides, "training.steps=30")
