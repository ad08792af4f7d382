"""Composition: values, provenance, the user's own folders, and every problem at once."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from whole_recipes import WHOLE

from trainctl.config.catalog import chosen_options, option_names, search_folders, shipped_root
from trainctl.config.codec import to_plain
from trainctl.config.compose import ComposedConfig, compose, recompose
from trainctl.config.schema import GROUPS, LIST_GROUPS, OffloadDevice
from trainctl.config.suggest import VARIANTS
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.launchers.planning import compose_config

Write = Callable[[str, str], Path]
TINY = "defaults: [tiny, _self_]\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file of the user's, in a current folder whose name has a comma and spaces."""
    here = tmp_path / "a folder, mine='x'"
    here.mkdir()
    monkeypatch.chdir(here)

    def write_file(name: str, text: str) -> Path:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def problems(*overrides: str, config_dir: Path | None = None) -> list[Finding]:
    with pytest.raises(TrainctlError) as caught:
        compose(overrides, config_dir=config_dir)
    assert caught.value.exit_code is ExitCode.bad_input
    return [finding for finding in caught.value.findings if finding.is_error]


def value(plain: dict[str, Any], key: str) -> object:
    node = plain
    for name in key.split("."):
        node = node[name]
    return node


@cache
def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


# ------------------------------------------------------------------------------ values


def test_the_base_configuration_composes_without_overrides() -> None:
    config = compose([]).config
    assert config.recipe is None
    assert config.model.name == "tiny-llama"
    assert config.zero_stage.stage == 1


def test_a_recipe_and_overrides_of_groups_and_keys() -> None:
    composed = compose(["recipe=7b-zero2", "zero_stage=3", "optimizer.lr=1e-4", "offload=cpu"])
    config = composed.config
    assert config.recipe == "7b-zero2"
    assert config.zero_stage.stage == 3
    assert config.optimizer.lr == 1e-4
    assert config.offload.optimizer is OffloadDevice.cpu
    assert composed.overrides[1] == "zero_stage=3"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_zero_stage_works_as_typed(stage: int) -> None:
    assert compose([f"zero_stage={stage}"]).config.zero_stage.stage == stage


@pytest.mark.parametrize(
    ("overrides", "nodes", "devices"),
    [
        ([], 1, 8),
        (["hardware=cpu"], 1, 1),
        (["hardware=2xcpu"], 1, 2),
        (["hardware=h100-80g"], 1, 8),
        (["hardware=h200-141g"], 1, 1),
        (["hardware=4xh100-80g"], 1, 4),
        (["hardware=4x8xh100-80g"], 4, 8),
        (["hardware.nodes=3", "hardware=4x8xh100-80g"], 3, 8),
        (["hardware=auto"], 1, None),
        (["hardware.nodes=2"], 2, 8),
    ],
)
def test_hardware_on_the_command_line_replaces_the_counts_of_a_recipe(
    overrides: list[str], nodes: int, devices: int | None
) -> None:
    hardware = compose(["recipe=7b-zero3", *overrides]).config.hardware
    assert (hardware.nodes, hardware.devices_per_node) == (nodes, devices)


def test_an_option_on_the_command_line_replaces_what_the_recipe_set_in_its_section() -> None:
    assert compose(["recipe=7b-zero2"]).config.schedule.warmup_steps == 2000
    config = compose(["recipe=7b-zero2", "schedule=linear", "optimizer=lion"]).config
    assert config.schedule.warmup_steps is None
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.kind == "lion"


def test_counts_of_hardware_name_all_machines() -> None:
    """`8xh100-80g` is one machine, although the recipe has eight."""
    config = compose(["recipe=70b-zero3-nodes", "hardware=8xh100-80g"]).config
    assert (config.hardware.nodes, config.hardware.devices_per_node) == (1, 8)


@pytest.mark.parametrize("recipe", ["7b-zero3", "sft-8b-lora-1x24g", "70b-3d", "mine"])
def test_the_option_that_is_chosen_already_changes_nothing(write: Write, recipe: str) -> None:
    write(
        "recipes/mine.yaml",
        "defaults: [7b-zero3, override /schedule: linear, _self_]\nschedule: {warmup_steps: 7}\n",
    )
    before = compose([f"recipe={recipe}"])
    chosen = chosen_options(search_folders(), recipe)
    again = compose([f"recipe={recipe}", *(f"{g}={option}" for g, option in chosen.items())])
    assert set(chosen) == {*GROUPS, *LIST_GROUPS}
    assert again.config == before.config
    assert again.layers == before.layers
    assert again.findings == before.findings


def test_values_that_an_option_drops_are_one_warning_that_brings_them_back(write: Write) -> None:
    write(
        "recipes/mine.yaml",
        "defaults: [7b-zero3, _self_]\n"
        "optimizer: {lr: 5.0e-5, beta2: 0.9}\n"
        "data: {paths: ['a b/*.txt'], held_out_fraction: 0.01}\n",
    )
    typed = ["recipe=mine", "optimizer=sgd", "schedule=linear", "data=files", "data.paths=[c]"]
    composed = compose(typed)
    (dropped,) = [finding for finding in composed.findings if finding.rule == "TC420"]
    assert dropped.severity == "warning"
    assert dropped.message == (
        "optimizer=sgd, schedule=linear, data=files drop what the recipe set: "
        "optimizer.lr=5e-05 (recipes/mine.yaml:2), "
        "schedule.warmup_steps=2000 (recipes/7b-zero2.yaml:21), "
        "data.held_out_fraction=0.01 (recipes/mine.yaml:3)"
    )
    assert dropped.hint.startswith("to keep them: ")
    back = shlex.split(dropped.hint.partition(": ")[2])
    kept = compose([*typed, *back])
    assert "TC420" not in [finding.rule for finding in kept.findings]
    assert kept.config.schedule.warmup_steps == 2000
    assert kept.config.optimizer.lr == 5e-5
    assert compose(["recipe=7b-zero3", "schedule=cosine", "optimizer=adamw"]).findings == ()


# ------------------------------------------------------------------------ alternatives


def told(composed: ComposedConfig) -> list[tuple[str, str]]:
    return [(f.rule, f.message) for f in composed.findings]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["recipe=tiny", "training.tokens=2M"],
            "training.tokens=2M replaces training.steps=160 of recipes/tiny.yaml:23",
        ),
        (
            ["recipe=dpo-8b-lora", "training.steps=9"],
            "training.steps=9 replaces training.epochs=1.0 of recipes/dpo-8b-lora.yaml:36",
        ),
        (
            ["recipe=7b-zero3", "training.epochs=2"],
            "training.epochs=2 replaces training.tokens=135000000000 of recipes/7b-zero2.yaml:24",
        ),
        (
            ["recipe=7b-zero3", "training.global_batch_tokens=2M"],
            "training.global_batch_tokens=2M replaces training.global_batch_size=1024 of "
            "recipes/7b-zero2.yaml:26",
        ),
        (
            ["recipe=7b-zero3", "schedule.warmup_fraction=0.05"],
            "schedule.warmup_fraction=0.05 replaces schedule.warmup_steps=2000 of "
            "recipes/7b-zero2.yaml:21",
        ),
        (
            ["recipe=mine"],
            "training.epochs=3 replaces training.tokens=135000000000 of recipes/7b-zero2.yaml:24",
        ),
    ],
)
def test_the_alternative_that_is_set_later_holds(
    write: Write, overrides: list[str], message: str
) -> None:
    write("recipes/mine.yaml", "defaults: [7b-zero3, _self_]\ntraining: {epochs: 3}\n")
    composed = compose(overrides)
    assert ("TC421", message) in told(composed)
    replaced, _, _ = message.partition("replaces ")[2].partition("=")
    assert value(to_plain(composed.config), replaced) is None
    assert composed.layers[replaced][-1].source.startswith("default (replaced by ")


def test_the_alternative_of_a_recipe_that_is_put_aside_by_hand_is_no_matter() -> None:
    composed = compose(["recipe=tiny", "training.epochs=2", "training.steps=null"])
    assert composed.config.training.epochs == 2
    assert "TC421" not in [finding.rule for finding in composed.findings]
    assert (
        compose(["schedule=wsd", "schedule.warmup_steps=9", "schedule.decay_steps=9"]).findings
        == ()
    )


def test_two_alternatives_at_one_level_are_an_error(write: Write) -> None:
    write("recipes/mine.yaml", "defaults: [tiny, _self_]\ntraining:\n  steps: 3\n  epochs: 2\n")
    for overrides, source in (
        (["training.steps=3", "training.epochs=2"], "training.steps=3, training.epochs=2"),
        (["recipe=mine"], "recipes/mine.yaml:3, recipes/mine.yaml:4"),
    ):
        (problem,) = problems(*overrides)
        assert (problem.rule, problem.key, problem.source) == ("TC421", "training.epochs", source)
        assert problem.hint == "keep one: training.steps=3 or training.epochs=2"


def test_a_run_configured_in_epochs_is_resumed_in_steps() -> None:
    config = compose(["training.epochs=2", "training.epoch_tokens=5000"]).config
    composed = recompose(config, ["training.steps=9"])
    training = composed.config.training
    assert (training.steps, training.epochs, training.epoch_tokens) == (9, None, None)
    assert told(composed) == [
        ("TC421", "training.steps=9 replaces training.epochs=2.0 of config.yaml of the run")
    ]


@pytest.mark.parametrize(
    "override",
    [
        "model.path=s3://b/m",
        "model.initial_weights=gs://b/m",
        "tokenizer.path=hf://a/b",
        "offload.nvme_path=file:///mnt/nvme",
        "data.chat_template=https://x/y.jinja",
        "launcher.hostfile=s3://b/hosts",
        "logging.prometheus.folder=s3://b/p",
        "script=s3://b/train.py",
    ],
)
def test_a_key_that_names_a_place_takes_no_address(override: str) -> None:
    (problem,) = problems(override)
    assert (problem.rule, problem.source) == ("TC102", override)
    assert "is an address, and no place in a file system" in problem.message
    assert "/mnt/nvme" in problem.hint if "file:" in override else "of this machine" in problem.hint


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, settings.split()) for name, settings in VARIANTS["objective"].items()],
)
def test_a_variant_of_another_trainer_names_option_and_keys(name: str, settings: list[str]) -> None:
    (problem,) = problems(f"objective={name}")
    assert problem.hint.startswith(f"{name} is {' '.join(settings)}. options of objective: ")
    chosen, *keys = settings
    section = compose([chosen, *keys]).config.objective
    assert section.kind == chosen.partition("=")[2]


def test_a_launcher_that_went_names_the_page() -> None:
    (problem,) = problems("launcher=skypilot")
    page, _, anchor = re.search(r"docs/([\w.]+)(#)(\w+)", problem.hint).groups()
    text = (shipped_root() / "docs" / page).read_text(encoding="utf-8")
    section = text.partition("## SkyPilot\n")[2].partition("\n## ")[0]
    assert (problem.rule, anchor) == ("TC108", "skypilot") and "trainctl launch" in section


def test_hosts_with_several_devices_are_chosen_as_the_page_and_the_message_say() -> None:
    chosen = "node1@node2:0,2"
    page = (shipped_root() / "docs" / "multi-node.md").read_text(encoding="utf-8")
    (problem,) = problems(f"launcher.include={chosen}")
    for text in (page, problem.hint):
        (override,) = re.findall(r"\"(launcher\.include='.*?')\"", text)
        assert compose(["launcher=ssh", override]).config.launcher.include == chosen


@pytest.mark.parametrize("name", ["ppo", "BCO"])
def test_an_objective_that_is_not_there_is_near_to_none(name: str) -> None:
    (problem,) = problems(f"objective={name}")
    assert problem.hint == f"trainctl does not have {name}. options of objective: " + ", ".join(
        option_names(search_folders(), "objective")
    )


@pytest.mark.parametrize("override", ["metrics=wandb", "wandb=true", "report_to=wandb"])
def test_another_word_for_a_metrics_logger_names_the_key(override: str) -> None:
    (problem,) = problems(override)
    assert problem.hint == "did you mean logging.to?"


def test_a_key_wins_over_an_option_wherever_it_stands() -> None:
    config = compose(["optimizer.lr=0.5", "optimizer=lion"]).config
    assert config.optimizer.lr == 0.5


def test_free_form_mappings_need_no_plus() -> None:
    config = compose(
        [
            "deepspeed.zero_optimization.stage3_max_live_parameters=1",
            "+deepspeed.zero_optimization.x=[1,a]",
            "++deepspeed.y=2.5",
            "deepspeed={z: {w: true}}",
            "launcher.environment.NUMBER=007",
            "launcher.environment.QUOTED='a; $(b)'",
            "launcher.environment={OTHER: 8}",
            "launcher.plain_environment=[NUMBER,QUOTED,O*]",
        ]
    ).config
    assert config.deepspeed == {
        "zero_optimization": {"stage3_max_live_parameters": 1, "x": [1, "a"]},
        "y": 2.5,
        "z": {"w": True},
    }
    assert config.launcher.environment == {"NUMBER": "007", "QUOTED": "a; $(b)", "OTHER": "8"}


def test_values_take_the_type_of_their_key() -> None:
    config = compose(
        [
            "zero_stage.reduce_bucket_size=5e8",
            "optimizer.lr=1",
            "model.name=007",
            "training.sample_prompt='a, b = 1'",
            "training.steps=null",
            "training.tokens=1_000",
            "zero_stage.overlap_comm=yes",
            "data=files",
            "data.paths=[/a b/*.txt,c]",
        ]
    ).config
    assert config.zero_stage.reduce_bucket_size == 500_000_000
    assert isinstance(config.zero_stage.reduce_bucket_size, int)
    assert isinstance(config.optimizer.lr, float)
    assert config.model.name == "007"
    assert config.training.sample_prompt == "a, b = 1"
    assert config.training.steps is None
    assert config.training.tokens == 1000
    assert config.zero_stage.overlap_comm is True
    assert config.data.paths == ["/a b/*.txt", "c"]


def test_references_are_resolved_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_TEST_SEED", "7")
    composed = compose(
        [
            "training.steps=30",
            "training.seed=${oc.env:TRAINCTL_TEST_SEED}",
            "training.stop_after_steps=${training.steps}",
            "deepspeed.a=${training.stop_after_steps}",
        ]
    )
    assert composed.config.training.seed == 7
    assert composed.config.training.stop_after_steps == 30
    assert composed.config.deepspeed == {"a": 30}
    (found,) = problems("training.seed=${model.name}")
    assert (found.rule, found.key) == ("TC102", "training.seed")
    (found,) = problems("training.seed=${nothing}")
    assert "nothing" in found.message


# -------------------------------------------------------------------------- provenance


@pytest.mark.parametrize("recipe", WHOLE)
@pytest.mark.parametrize("overrides", [[], ["offload=cpu", "hardware=2xcpu", "training.seed=3"]])
def test_each_layer_names_the_line_that_set_it_and_the_last_one_won(
    recipe: str, overrides: list[str]
) -> None:
    composed = compose([f"recipe={recipe}", *overrides])
    plain = to_plain(composed.config)
    for key, layers in composed.layers.items():
        assert value(plain, key) == layers[-1].value, key
        for layer in layers:
            place = layer.source.split(" ")[0]
            if ".yaml:" in place:
                name, line = place.split(":")
                text = lines(shipped_root() / name)[int(line) - 1]
                assert text.strip().startswith(key.rpartition(".")[2] + ":"), (key, layer)


def test_layers_stand_in_order_of_application() -> None:
    composed = compose(["recipe=1b-zero1", "optimizer.lr=1e-4"])
    sources = [layer.source for layer in composed.layers["optimizer.lr"]]
    assert [source.partition(":")[0] for source in sources] == [
        "conf/optimizer/adamw.yaml",
        "recipes/1b-zero1.yaml",
        "optimizer.lr=1e-4",
    ]
    assert composed.source_of("optimizer.lr") == "optimizer.lr=1e-4"
    assert composed.source_of("optimizer.decay_embeddings") == ""


def test_an_option_of_the_command_line_is_named_with_its_file() -> None:
    composed = compose(["recipe=7b-zero3", "offload=cpu", "hardware=cpu", "deepspeed.a.b=1"])
    assert composed.source_of("offload.optimizer").startswith("conf/offload/cpu.yaml:")
    assert composed.source_of("offload.optimizer").endswith("(chosen by offload=cpu)")
    devices = [layer.source for layer in composed.layers["hardware.devices_per_node"]]
    assert devices[0].startswith("recipes/7b-zero2.yaml:")
    assert devices[-1].endswith("(chosen by hardware=cpu)")
    assert composed.source_of("deepspeed") == "deepspeed.a.b=1"


def test_two_compositions_do_not_meet(write: Write) -> None:
    write("conf/model/mine.yaml", "hidden_size: 64\n")
    assert compose(["model=mine"]).config.model.hidden_size == 64
    assert not GlobalHydra.instance().is_initialized()
    first = compose(["recipe=tiny", "training.seed=1"])
    assert compose(["recipe=tiny"]).config.training.seed == 1234
    assert first.config.training.seed == 1


# ------------------------------------------------------------------- the user's folders


@pytest.mark.parametrize("nested", [True, False])
def test_a_folder_of_ones_own_by_config_dir(write: Write, nested: bool) -> None:
    conf, recipes_folder = ("own/conf/", "own/recipes/") if nested else ("own/", "own/")
    write(f"{conf}optimizer/mine.yaml", "# Mine.\ndefaults: [adamw, _self_]\nlr: 0.25\n")
    path = write(
        f"{recipes_folder}mine.yaml",
        "# My own.\ndefaults:\n- tiny\n- override /optimizer: mine\n- _self_\ntraining:\n"
        "  steps: 9\n",
    )
    root = path.parents[1] if nested else path.parent
    composed = compose(["recipe=mine"], config_dir=root)
    assert composed.config.training.steps == 9
    assert composed.config.training.sequence_length == 256
    assert composed.config.optimizer.beta2 == 0.95
    assert composed.source_of("training.steps") == f"{path}:7"
    assert composed.findings == ()
    chosen = compose(["recipe=tiny", "optimizer=mine"], config_dir=root)
    values = [layer.value for layer in chosen.layers["optimizer.lr"]]
    assert values == [3e-3, 3e-4, 3e-4, 0.25]  # recipe, its reset, adamw, mine
    assert chosen.config.optimizer.weight_decay == 0.1


def test_the_current_folder_is_searched(write: Write) -> None:
    write("conf/schedule/mine.yaml", "kind: linear\n")
    write("recipes/mine.yaml", "defaults: [base, {override /schedule: mine}, _self_]\n")
    composed = compose(["recipe=mine"])
    assert composed.config.schedule.kind == "linear"
    assert composed.source_of("schedule.kind") == "conf/schedule/mine.yaml:1"


def test_files_that_change_between_two_compositions_are_ordered_anew(write: Write) -> None:
    """Hydra's order is kept for as long as all that it was made from is the same."""
    write("recipes/mine.yaml", "defaults: [tiny, _self_]\n")
    assert compose(["recipe=mine"]).config.optimizer.kind == "adamw"
    write("recipes/mine.yaml", "defaults: [tiny, {override /optimizer: lion}, _self_]\n")
    assert compose(["recipe=mine"]).config.optimizer.kind == "lion"
    write("recipes/tiny.yaml", "defaults: [base, {override /schedule: linear}, _self_]\n")
    composed = compose(["recipe=mine"])
    assert composed.config.schedule.kind == "linear" and composed.config.optimizer.kind == "lion"
    write("conf/optimizer/lion.yaml", "defaults: [sgd, _self_]\n")
    assert compose(["recipe=mine"]).config.optimizer.kind == "sgd"
    write("recipes/tiny.yaml", "defaults: [base, _self_]\n").unlink()
    assert compose(["recipe=mine"]).config.schedule.kind == "cosine"


def test_shadowing_is_a_warning_when_it_matters(write: Write) -> None:
    write("conf/optimizer/adamw.yaml", "lr: 0.125\n")
    write("recipes/tiny.yaml", "defaults: [base, _self_]\ntraining: {steps: 3}\n")
    write("conf/optimizer/late.yml", "lr: 1\n")
    composed = compose(["recipe=tiny"])
    assert composed.config.optimizer.lr == 0.125
    messages = {finding.rule: finding.message for finding in composed.findings}
    assert "hides the shipped conf/optimizer/adamw.yaml" in " ".join(
        finding.message for finding in composed.findings
    )
    assert [finding.rule for finding in composed.findings].count("TC106") == 2
    assert "late.yml is not read" in messages["TC107"]
    quiet = compose(["recipe=125m", "optimizer=sgd"])
    assert [finding.rule for finding in quiet.findings] == ["TC107", "TC420"]


def test_an_identical_copy_is_no_shadow(write: Write) -> None:
    write("conf/optimizer/adamw.yaml", (shipped_root() / "conf/optimizer/adamw.yaml").read_text())
    assert compose([]).findings == ()


def test_a_config_dir_must_be_a_folder_with_something_in_it(tmp_path: Path) -> None:
    for folder, words in [(tmp_path / "none", "not a folder"), (tmp_path, "neither options")]:
        with pytest.raises(TrainctlError, match=words):
            compose([], config_dir=folder)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("defaults: [base, _self_]\noptimizer:\n  lrr: 1\n", 3, "optimizer.lr"),
        ("defaults: [base, _self_]\n\ntraining: {steps: many}\n", 3, "whole number"),
        ("defaults: [base, _self_]\ntraining:\n  steps: -1\n", 3, "nearest legal value: 0"),
        ("defaults: [base, _self_]\ntraining:\n  steps: 1\n  steps: 2\n", 4, "set twice"),
        ("defaults: [base, _self_]\nmodel: {_target_: os.system}\n", 2, "_target_"),
        ("defaults: [base, _self_]\nmodel: {name: '${hydra:job.name}'}\n", 2, "hydra"),
        ("defaults: [base, _self_]\nhydra: {searchpath: [/]}\n", 2, "hydra.searchpath"),
        ("defaults:\n- base\n- override /zero_stage: 3\n- _self_\n", 3, 'zero_stage: "3"'),
        ("defaults:\n- base\n- override /model: llama7b\n", 3, "model=llama-7b"),
        ("defaults:\n- base\n- override /modle: llama-7b\n", 3, "did you mean model"),
        ("defaults:\n- 7b-zero4\n", 2, "recipe=7b-zero3"),
        ("defaults:\n- ../conf/base\n", 2, "no recipe"),
        ("defaults:\n- mine\n", 2, "circle"),
        ("defaults:\n- [a, b]\n", 2, "defaults list"),
        ("training: {steps: 1}\n", None, "base"),
        ("c: 3\na: [1\nb: 2\n", 2, "not valid YAML"),
        ("c: 3\na: [1\n\nb: 2\n", 2, "close the bracket"),
        ("a: b: c\n", 1, "in quotes"),
        ("a: @b\n", 1, "begins with @"),
        ("a: *b\n", 1, "begins with * or &"),
        ('c: 3\na: "b\nd: 4\n', 2, "close the quotes"),
        ("a:\n  b: 1\n c: 2\n", 3, "the same number of spaces"),
        ("a: 1\n---\nb: 2\n", 2, "one document"),
        ("- 1\n", 1, "key: value"),
        ("\tx: 1\n", 1, "not valid YAML"),
        ("defaults: [base, _self_]\ntraining:\n\tsteps: 1\n", 3, "indent with spaces"),
        ("defaults: tiny\ntraining: {steps: 1}\n", 1, "defaults: [base, _self_]"),
        ("defaults: [base, _self_]\nmodel: llama-7b\n", 2, "- override /model: llama-7b"),
        ("defaults: [base, _self_]\nzero_stage: 3\n", 2, '- override /zero_stage: "3"'),
        ("defaults: [base]\nx: !!python/object:os.system {}\n", 2, "not valid YAML"),
        ("a: &a [*a]\n", None, "mine.yaml"),
        # An = for the colon, or no space behind it, in each place of a file.
        (f"{TINY}training:\n  steps = 40\noptimizer: {{lr: 1}}\n", 3, "`steps: 40`"),
        (f"{TINY}training:\n  steps = 40\n  seed: 1\n", 3, "`steps: 40`"),
        (f"{TINY}training:\n  seed: 1\n  steps = 40\n", 4, "`steps: 40`"),
        (f"{TINY}training:\n  seed: 1\n  steps = 40\n  tokens: 3\n", 4, "`steps: 40`"),
        (f"{TINY}training:\n  # About.\n  steps=40\n", 4, "`steps: 40`"),
        (f"{TINY}training:\n  steps:40\n", 3, "`steps: 40`"),
        (f"{TINY}training:\n  seed: 1\n  steps:40\n", 4, "`steps: 40`"),
        (f"{TINY}training: steps = 40\n", 2, "`steps: 40`"),
        (f"{TINY}training.steps = 40\n", 2, "`training: {steps: 40}`"),
        ("steps = 40\n", 1, "`steps: 40`"),
        (f"{TINY}data:\n  sources:\n    a:\n      tokens = 3\n", 5, "`tokens: 3`"),
        ("defaults:\n- tiny\n- schedule = wsd\n- _self_\n", 3, "`- override /schedule: wsd`"),
        ("defaults:\n- recipe=tiny\n- _self_\n", 2, "`- tiny`"),
        ("defaults:\n- recipe: tiny\n- _self_\n", 2, "`- tiny`"),
        # What Hydra refuses without a line.
        ("defaults:\n- tiny\n- schedule: wsd\n- _self_\n", 3, "`- override /schedule: wsd`"),
        ("defaults:\n- tiny\n- optional /schedule: wsd\n", 3, "`- override /schedule: wsd`"),
        ("defaults:\n- override /schedule: wsd\n- tiny\n", 2, "below `- tiny`"),
        ("defaults:\n- tiny\n- 125m\n- _self_\n", 3, "keep one of tiny and 125m"),
        ("defaults:\n- base\n- _self_\n- tiny\n", 4, "keep one of base and tiny"),
        ("defaults:\n- _self_\n- tiny\n- _self_\n", 4, "`_self_` twice"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
    ],
)
def test_a_broken_recipe_is_reported_with_its_line(
    write: Write, text: str, line: int | None, words: str
) -> None:
    write("recipes/mine.yaml", text)
    found = problems("recipe=mine")
    assert all(finding.source.startswith("recipes/mine.yaml") for finding in found), found
    assert any(words in f"{finding.message} {finding.hint}" for finding in found), found
    if line is not None:
        assert f"recipes/mine.yaml:{line}" in {finding.source for finding in found}
    if text.startswith((TINY, "defaults:\n")):
        assert len(found) == 1, "one mistake is one error"


def test_no_file_is_a_second_error_beside_the_order_that_cannot_be_computed(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Finding(rule="TC105", message="Hydra cannot compose these files")
    monkeypatch.setattr("trainctl.config.defaults_list.files_in_order", lambda *_: wrong)
    with pytest.raises(TrainctlError) as caught:
        compose_config(["recipe=tiny"], None)
    assert caught.value.findings == (wrong,)


@pytest.mark.parametrize(
    ("name", "text", "line", "lost"),
    [
        (
            "recipes/mine.yaml",
            "defaults:\n- _self_\n- tiny\ntraining: {steps: 7}\noptimizer: {lr: 2e-3}\n",
            3,
            ["training.steps=160 (recipes/tiny.yaml:", "optimizer.lr=0.003 (recipes/tiny.yaml:"],
        ),
        (
            "conf/optimizer/mine.yaml",
            "defaults:\n- _self_\n- adamw\nbeta1: 0.8\nbeta2: 0.95\n",
            3,
            ["optimizer.beta1=0.9 (conf/optimizer/adamw.yaml:"],
        ),
    ],
)
def test_keys_that_a_later_line_of_the_defaults_list_overrides_are_warned_of(
    write: Write, name: str, text: str, line: int, lost: list[str]
) -> None:
    write(name, text)
    kind = "recipe" if name.startswith("recipes") else "optimizer"
    write("recipes/child.yaml", "defaults:\n- mine\n- _self_\noptimizer: {lr: 5e-3}\n")
    composed = compose([f"{kind}=mine"])
    (found,) = (each for each in composed.findings if each.rule == "TC585")
    assert (found.severity, found.source) == ("warning", f"{name}:{line}")
    assert all(each in found.message for each in lost), found.message
    assert found.message.count("=") == len(lost) and "`- _self_`" in found.hint
    if kind == "recipe":  # keys that the recipe's own child sets are the child's
        (found,) = (each for each in compose(["recipe=child"]).findings if each.rule == "TC585")
        assert "optimizer.lr" not in found.message
    write(name, text.replace("- _self_\n", "", 1))
    assert not [each for each in compose([f"{kind}=mine"]).findings if each.rule == "TC585"]


def test_an_unreadable_option_is_reported(write: Write) -> None:
    write("conf/model/mine.yaml", "x").write_bytes(b"name: \xff\xfe")
    (found,) = problems("model=mine")
    assert "conf/model/mine.yaml is not UTF-8 text" in found.message


def test_two_recipes_in_a_circle(write: Write) -> None:
    write("recipes/one.yaml", "defaults: [two]\n")
    write("recipes/two.yaml", "defaults: [one]\n")
    (found,) = problems("recipe=one")
    assert "one -> two -> one" in found.message


# ------------------------------------------------------------------- everything at once


def test_all_problems_of_a_command_line_and_of_its_files_are_reported_together(
    write: Write,
) -> None:
    write("recipes/mine.yaml", "defaults: [tiny, _self_]\ntraining: {stepps: 1}\ndata: {kind: x}\n")
    found = problems(
        "recipe=mine",
        "model=llama7b",
        "lr=1e-3",
        "training.steps=1.5",
        "zero_stage.stage=7",
        "+zero_stage.foo=1",
        "~optimizer.lr",
        "optimizer.lr=1,2",
        "training.sample_prompt=def f(",
    )
    assert [finding.source for finding in found] == [
        "model=llama7b",
        "lr=1e-3",
        "training.steps=1.5",
        "zero_stage.stage=7",
        "+zero_stage.foo=1",
        "~optimizer.lr",
        "optimizer.lr=1,2",
        "training.sample_prompt=def f(",
        "recipes/mine.yaml:2",
        "recipes/mine.yaml:3",
    ]
    assert all(finding.message and finding.rule for finding in found)


@pytest.mark.parametrize(
    ("override", "rule", "hint"),
    [
        ("recipe=7b-zero4", "TC109", "recipe=7b-zero3"),
        ("model=llama7b", "TC108", "model=llama-7b"),
        ("model=../base", "TC108", "options of model"),
        ("model=null", "TC108", "options of model"),
        ("model=[llama-7b]", "TC108", "model=llama-7b"),
        ("hardware=8xh100", "TC108", "hardware=8xh100-80g"),
        ("hardware=0xcpu", "TC103", "nearest legal value: 1"),
        ("modle=llama-7b", "TC101", "did you mean model"),
        ("gradient_clipping=1", "TC101", "optimizer.gradient_clipping"),
        ("learning_rate=1", "TC101", "optimizer.lr"),
        ("batch_size=1", "TC101", "training.global_batch_size"),
        ("trainer.max_steps=1", "TC101", "training.steps"),
        ("zero_optimization.stage=3", "TC101", "deepspeed.zero_optimization.stage"),
        ("optimizer.lrr=1", "TC101", "did you mean optimizer.lr"),
        ("optimizer.lr.x=1", "TC101", "set optimizer.lr"),
        ("training=3", "TC101", "training.seed"),
        ("hydra.verbose=true", "TC101", ""),
        ("hydra/launcher=x", "TC104", "GROUP=OPTION"),
        ("model@x=llama-7b", "TC104", "GROUP=OPTION"),
        ("schedule.kind=cosin", "TC102", "did you mean cosine"),
        ("optimizer.lr=abc", "TC102", "1e-4"),
        ("optimizer.lr=nan", "TC102", "1e-4"),
        ("optimizer.lr=null", "TC102", "its default is 0.0003"),
        ("optimizer.lr=0", "TC103", "more than 0"),
        ("optimizer.lr=???", "TC102", "number"),
        ("training.steps=1.5", "TC102", "write 2"),
        ("training.steps=true", "TC102", "write 1"),
        ("training.steps=1e300", "TC102", "at most"),
        ("model.mup=1", "TC102", "write true"),
        ("model.name=[a]", "TC102", "quote"),
        ("data.paths=x", "TC102", "[x]"),
        ("deepspeed=3", "TC102", "{key: value}"),
        ("deepspeed.a=inf", "TC102", ""),
        ("deepspeed._target_=os.system", "TC104", "option"),
        ("deepspeed.a=${hydra:job.name}", "TC104", "oc.env"),
        ("training.seed=choice(1,2)", "TC104", "one value"),
        ("optimizer.lr=interval(0,1)", "TC104", "one value"),
        ("optimizer.lr=1e-3,1e-4", "TC104", "trainctl sweep"),
        ("tiny", "TC110", "recipe=tiny"),
        ("xyzzy=1", "TC101", "config show"),
        ("recipe", "TC110", "write recipe=OPTION"),
        ("optimizer", "TC110", "write optimizer=OPTION"),
        ("training.steps", "TC110", "write training.steps=VALUE"),
        ("hardware=99999999999xh100-80g", "TC103", "100000"),
        ("model.num_layers=9999999999999", "TC103", "10000"),  # names of tensors without end
        ("training.batch_ramp=5", "TC102", "[{until_steps: 500, global_batch_size: 64}]"),
        ("training.batch_ramp=[5]", "TC102", "[{until_steps: 500, global_batch_size: 64}]"),
        ("training.batch_ramp={until_steps: 5}", "TC102", "write it as [{until_steps: 5}]"),
        ("optimizer.groups=norm", "TC102", "[{match: norm, lr_factor: 0.5}]"),
        ("launcher.hosts=a", "TC102", "write it as [a]"),
        ("launcher.hosts=", "TC102", "[] for none"),
        ("launcher.interfaces=a", "TC102", "{key: value}"),
        ("", "TC110", "KEY=VALUE"),
        ("=", "TC110", "KEY=VALUE"),
        ("a b=1", "TC110", ""),
    ],
)
def test_a_wrong_override_is_reported_with_the_nearest_right_one(
    override: str, rule: str, hint: str
) -> None:
    (found,) = problems(override)
    assert found.rule == rule
    assert hint in found.hint
    assert found.source == override


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4M", 4_000_000), ("1.5k", 1500), ("2T", 2 * 10**12), ("0.5B", 500_000_000), ("64", 64)],
)
def test_tokens_are_counted_in_powers_of_ten(text: str, tokens: int) -> None:
    composed = compose([f"training.global_batch_tokens={text}", f"training.tokens={text}"])
    assert composed.config.training.global_batch_tokens == tokens
    assert composed.config.training.tokens == tokens


@pytest.mark.parametrize("text", ["4X", "M", "4MB", "2GB", "-4M"])
def test_invalid_token_counts_are_refused_with_the_suffixes(text: str) -> None:
    with pytest.raises(TrainctlError) as caught:
        compose([f"training.tokens={text}"])
    (found,) = caught.value.findings
    assert found.rule in ("TC102", "TC103")
    assert "with k, M, B or T behind it" in found.hint


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("training.steps=4k", "training.steps", 4000),
        ("training.tokens=1.005k", "training.tokens", 1005),
        ("training.time_limit_minutes=4h", "training.time_limit_minutes", 240),
        ("launcher.grace_seconds='2 min'", "launcher.grace_seconds", 120),
        ("data.max_bytes=1.5GiB", "data.max_bytes", 3 * 2**29),
        ("hardware.device_memory_bytes=80GB", "hardware.device_memory_bytes", 80 * 10**9),
        ("zero_stage.reduce_bucket_size=500M", "zero_stage.reduce_bucket_size", 500_000_000),
    ],
)
def test_every_number_with_a_unit_takes_its_suffixes(
    override: str, key: str, expected: float
) -> None:
    assert value(to_plain(compose([override]).config), key) == expected


def test_entries_of_lists_and_sections_take_suffixes() -> None:
    stages = "[{until_tokens: 1M, sequence_length: 1k}, {sequence_length: 2048}]"
    config = compose(
        [
            "schedule=milestones",
            "schedule.milestones=[8k,9k]",
            "training.batch_ramp=[{until_tokens: 1M, global_batch_size: 1k}]",
            f"data.stages={stages}",
            "data.sources={a: {kind: files, tokens: 2B}, b: {kind: stream, cache_bytes: 1GiB}}",
        ]
    ).config
    assert config.schedule.milestones == [8000, 9000]
    assert config.training.batch_ramp == [{"until_tokens": 1_000_000, "global_batch_size": 1000}]
    assert config.data.stages[0].until_tokens == 1_000_000
    assert config.data.sources["a"].tokens == 2 * 10**9
    assert config.data.sources["b"].cache_bytes == 2**30


def test_a_number_without_a_unit_has_no_suffix() -> None:
    for override in ("model.hidden_size=4k", "optimizer.lr=3m"):
        with pytest.raises(TrainctlError):
            compose([override])


def test_another_name_of_a_key_says_the_keys_own() -> None:
    composed = compose(["data.sequence_length=512"])
    assert composed.config.training.sequence_length == 512
    (found,) = composed.findings
    assert (found.rule, found.key) == ("TC100", "training.sequence_length")
    assert found.source == "data.sequence_length=512"


def test_an_override_that_is_overridden_is_a_warning() -> None:
    composed = compose(["training.seed=1", "training.seed=2", "model=gpt2-124m", "model=llama-7b"])
    assert composed.config.training.seed == 2
    assert composed.config.model.name == "llama-7b"
    sources = [finding.source for finding in composed.findings]
    assert sources == ["training.seed=2", "model=llama-7b"]


# --------------------------------------------------------------------------- recompose


def test_recompose_changes_only_what_is_asked() -> None:
    saved = compose(["recipe=7b-zero2", "training.seed=5"]).config
    same = recompose(saved, [])
    assert same.config == saved
    assert same.layers["training.seed"][0].source == "config.yaml of the run"
    changed = recompose(saved, ["zero_stage=3", "hardware=2xcpu", "training.steps=9"])
    assert changed.config.zero_stage.stage == 3
    assert changed.config.zero_stage.overlap_comm is True
    assert changed.config.hardware.devices_per_node == 2
    assert changed.config.training.seed == 5
    assert changed.config.model == saved.model
    assert changed.source_of("zero_stage.stage").endswith("(chosen by zero_stage=3)")
    assert saved.zero_stage.stage == 2


def test_recompose_of_an_option_equals_composing_with_it() -> None:
    saved = compose(["recipe=7b-zero2"]).config
    choices = ["schedule=wsd", "optimizer=muon", "offload=cpu-all", "hardware=8x8xb200-192g"]
    assert recompose(saved, choices).config == compose(["recipe=7b-zero2", *choices]).config


def test_recompose_tells_every_problem() -> None:
    with pytest.raises(TrainctlError) as caught:
        recompose(compose([]).config, ["recipe=tiny", "model=x", "lr=1", "training.steps=-1"])
    assert [finding.source for finding in caught.value.findings] == [
        "model=x",
        "lr=1",
        "training.steps=-1",
        "recipe=tiny",
    ]


# ------------------------------------------------------------------------------ imports


def test_importing_the_room_loads_no_hydra() -> None:
    code = (
        "import sys, trainctl.config.compose, trainctl.config.store, trainctl.config.catalog\n"
        "heavy = {'hydra', 'omegaconf', 'torch', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from trainctl.config.schema import RunConfig\n"
        "trainctl.config.compose.recompose(RunConfig(), [])\n"
        "assert 'hydra' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_key_does_not_choose_its_callback() -> None:
    key = "callbacks.layer_statistics.every_steps=5"
    with pytest.raises(TrainctlError) as refused:
        compose(["recipe=tiny", "callbacks=[gradient_noise_scale]", key])
    (finding,) = refused.value.findings
    assert "which `callbacks` does not choose" in finding.message and finding.source == key
    assert finding.hint == "callbacks=[gradient_noise_scale,layer_statistics]"
    chosen = compose(["recipe=tiny", finding.hint, key]).config
    assert chosen.callbacks["layer_statistics"]["every_steps"] == 5
    assert recompose(chosen, [key]).config == chosen
