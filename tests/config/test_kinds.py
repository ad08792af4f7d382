"""Sections whose options are units: the keys of each kind, and of no other."""

from __future__ import annotations

from dataclasses import fields

import pytest

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.compose import compose, compose_leniently, recompose
from trainctl.config.keys import keys_of, leaves
from trainctl.config.registry import (
    changed_section,
    list_kinds,
    load_spec,
    new_section,
    unit_groups,
    with_parts,
)
from trainctl.config.schema import LoggingConfig, RunConfig
from trainctl.errors import TrainctlError

UNITS = [(group, name) for group in unit_groups() for name in list_kinds(group)]


@pytest.mark.parametrize(("group", "name"), UNITS)
def test_a_unit_is_found_by_its_name_and_adds_keys_to_those_of_all(group, name):
    spec = load_spec(group, name)
    shared = type(getattr(RunConfig(), group)).__mro__[-2]
    assert spec.name == name
    assert {item.name for item in fields(shared)} <= {item.name for item in fields(spec.keys)}
    assert {key for key in leaves() if key.startswith(f"{group}.")} >= set(keys_of(group, name))


def test_a_key_of_several_kinds_is_described_as_the_default_one_has_it():
    assert leaves()["optimizer.kind"].default == "adamw"
    assert (
        leaves()["optimizer.epsilon"].metadata["doc"]
        == "Epsilon, added to the root of the second moment."
    )
    assert leaves()["optimizer.momentum"].kinds == ("muon", "sgd")


def test_a_typed_key_of_another_kind_is_unknown():
    with pytest.raises(TrainctlError) as raised:
        compose(["recipe=tiny", "optimizer.momentum=0.9"])
    (finding,) = raised.value.findings
    assert (finding.rule, finding.source) == ("TC101", "optimizer.momentum=0.9")
    assert finding.message == "there is no key optimizer.momentum with optimizer.kind=adamw"
    assert "optimizer=muon or sgd has it" in finding.hint


def test_the_chosen_kind_decides_whatever_came_before():
    composed = compose(["recipe=tiny", "optimizer=sgd", "optimizer.momentum=0.8"])
    assert composed.config.optimizer.momentum == 0.8
    assert [finding.rule for finding in composed.findings] == ["TC420"]  # the rate of AdamW
    assert not hasattr(composed.config.optimizer, "beta1")


@pytest.mark.parametrize(("extends", "severity"), [(True, "warning"), (False, "error")])
def test_a_key_of_a_recipe_that_is_extended_is_left_over(extends, severity, tmp_path, monkeypatch):
    """A key that the chosen recipe sets itself is an error; a key inherited with another optimizer
    is not.
    """
    (tmp_path / "recipes").mkdir()
    first = "defaults: [tiny, {override /optimizer: adamw}, _self_]\noptimizer: {beta2: 0.9}\n"
    second = "defaults: [first, {override /optimizer: sgd}, _self_]\n"
    if not extends:
        second += "optimizer: {beta2: 0.9}\n"
        first = "defaults: [tiny, _self_]\n"
    (tmp_path / "recipes" / "first.yaml").write_text(first)
    (tmp_path / "recipes" / "second.yaml").write_text(second)
    monkeypatch.chdir(tmp_path)
    composed = compose_leniently(["recipe=second"])
    (finding,) = composed.findings
    assert (finding.severity.value, finding.key) == (severity, "optimizer.beta2")
    assert composed.config.optimizer.kind == "sgd"


def test_what_the_command_line_replaces_is_left_over(tmp_path, monkeypatch):
    """A recipe for a cluster may be tried out locally: its launcher's keys only give a warning."""
    (tmp_path / "recipes").mkdir()
    text = "defaults: [tiny, {override /launcher: slurm}, _self_]\n"
    (tmp_path / "recipes" / "mine.yaml").write_text(f"{text}launcher: {{slurm_qos: high}}\n")
    monkeypatch.chdir(tmp_path)
    for chosen in ([], ["launcher=local"]):
        assert not compose(["recipe=mine", *chosen]).findings
    composed = compose(["recipe=mine", "launcher.kind=local"])
    (finding,) = composed.findings
    assert (finding.severity.value, finding.key) == ("warning", "launcher.slurm_qos")
    assert composed.config.launcher.kind == "local"


def test_a_mapping_that_is_set_entry_by_entry_stays():
    typed = ["launcher.environment.NCCL_DEBUG=INFO", "launcher.kubernetes_claims.a=/b"]
    launcher = compose(["recipe=tiny", "launcher=kubernetes", *typed]).config.launcher
    assert launcher.environment == {"NCCL_DEBUG": "INFO"}
    assert launcher.kubernetes_claims == {"a": "/b"}
    found = [finding.message for finding in compose_leniently(["recipe=tiny", *typed]).findings]
    assert found == ["there is no key launcher.kubernetes_claims with launcher.kind=local"]


def test_an_old_saved_configuration_may_have_keys_of_all_kinds():
    plain = to_plain(RunConfig())
    plain["optimizer"] |= {"momentum": 0.7, "matrix_lr": 0.1, "beta2": 0.9}
    read = from_plain(RunConfig, plain)
    assert read.optimizer == new_section("optimizer", "adamw", beta2=0.9)
    again = recompose(read, ["optimizer=muon", "optimizer.momentum=0.6"]).config
    assert again.optimizer.momentum == 0.6
    with pytest.raises(ValueError, match=r"unknown key optimizer\.momentom"):
        from_plain(RunConfig, {"optimizer": {"momentom": 1}})


def test_a_kind_of_a_package_that_is_not_there_is_named():
    with pytest.raises(TrainctlError, match="no kind 'signum'") as raised:
        from_plain(RunConfig, {"optimizer": {"kind": "signum"}})
    assert raised.value.exit_code == 4


def test_a_changed_section_is_one_of_the_kind_that_the_values_choose():
    adamw = new_section("optimizer", "adamw", lr=2.0, beta2=0.9, epsilon=0.1)
    assert changed_section(adamw, beta2=0.8) == new_section(
        "optimizer", "adamw", lr=2.0, beta2=0.8, epsilon=0.1
    )
    lion = changed_section(adamw, kind="lion", weight_decay=1.0)
    assert lion == new_section("optimizer", "lion", lr=2.0, beta2=0.9, weight_decay=1.0)


def test_the_key_that_chooses_need_not_be_called_kind():
    with pytest.raises(TrainctlError) as raised:
        compose(["recipe=tiny", "activation_checkpointing.offload_to_cpu=true"])
    (finding,) = raised.value.findings
    key = "activation_checkpointing.offload_to_cpu"
    assert finding.message == f"there is no key {key} with activation_checkpointing.mode=none"
    assert "activation_checkpointing=full or selective has it" in finding.hint
    chosen = compose(["recipe=tiny", "activation_checkpointing=full", f"{key}=true"]).config
    assert chosen.activation_checkpointing.offload_to_cpu
    left_over = recompose(chosen, ["activation_checkpointing.mode=none"])
    (finding,) = left_over.findings
    assert (finding.rule, finding.key, finding.is_error) == ("TC112", key, False)


def test_a_file_may_say_what_a_key_of_another_kind_is_by_default(tmp_path, monkeypatch):
    """Files written when all kinds had all keys contain such defaults."""
    (tmp_path / "conf" / "activation_checkpointing").mkdir(parents=True)
    option = tmp_path / "conf" / "activation_checkpointing" / "mine.yaml"
    option.write_text("mode: none\noffload_to_cpu: false\nevery_kth_block: 1\n")
    composed = compose(["recipe=tiny", "activation_checkpointing=mine"], config_dir=tmp_path)
    assert not composed.findings
    assert composed.config.activation_checkpointing == new_section(
        "activation_checkpointing", "none"
    )


def test_keys_of_a_logger_that_is_not_installed_here_are_left_out():
    plain = to_plain(RunConfig())
    plain["logging"] |= {"to": ["board"], "board": {"digits": 5}}
    assert from_plain(RunConfig, plain).logging == with_parts(LoggingConfig)(to=["board"])
    with pytest.raises(ValueError, match=r"unknown key logging\.tu"):
        from_plain(RunConfig, {"logging": {"tu": ["board"]}})


def test_names_of_loggers_are_checked_one_by_one():
    assert compose(["logging.to=[mlflow]"]).config.logging.to == ["mlflow"]
    with pytest.raises(TrainctlError) as raised:
        compose(["logging.to=[mlflow,mlflow]"])
    assert raised.value.findings[0].rule == "TC102"
    with pytest.raises(TrainctlError) as raised:
        compose(["logging.to=[mlflow,tensorbord]"])
    assert "did you mean tensorboard?" in raised.value.findings[0].hint
    with pytest.raises(TrainctlError) as raised:
        compose(["logging.to=mlflow"])
    assert raised.value.findings[0].hint == "write it as [mlflow]"
    with pytest.raises(TrainctlError) as raised:
        compose(["logging.to=[csv]"])
    assert "RUN/steps/attempt-N.csv" in raised.value.findings[0].hint


def test_a_key_about_a_number_format_is_of_that_format():
    with pytest.raises(TrainctlError) as raised:
        compose(["recipe=tiny", "precision=bf16", "precision.loss_scale=8"])
    (finding,) = raised.value.findings
    assert finding.message == "there is no key precision.loss_scale with precision.compute=bf16"
    assert "precision=fp16 has it" in finding.hint
    assert compose(["precision=fp16", "precision.loss_scale=8"]).config.precision.loss_scale == 8
    assert compose(["precision=autocast-bf16"]).config.precision.compute == "bf16"
