"""The configuration as a file, and the difference of two."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.config.store import Change, diff_configs, dump_config, load_config
from trainctl.errors import ExitCode, TrainctlError

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(text=TEXT, number=st.floats(allow_nan=False, allow_infinity=False), names=st.lists(TEXT))
def test_what_is_written_is_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float, names: list[str]
) -> None:
    config = RunConfig()
    config.model.name = config.training.sample_prompt = text
    config.optimizer.lr = number
    config.data = new_section("data", "files", paths=names)
    config.deepspeed = {"a": {"b": [number, text, None, True]}, "c": "1e-5"}
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def test_a_logger_that_is_no_more_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("logging: {to: [csv, wandb]}\n")
    assert load_config(path).logging.to == ["wandb"]


def test_a_file_of_an_older_version_keeps_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("training: {seed: 3}\n")
    config = load_config(path)
    assert config.training.seed == 3
    assert config.model == RunConfig().model


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"a: [1",
        b"- 1",
        b"",
        b"unknown: 1",
        b"training: {seed: x}",
        b"training: 3",
        b"data: {kind: files, paths: 3}",
        b"launcher: {environment: [1]}",
        b"model: {attention: nope}",
        b"model: {family: [1]}",
        b"x: !!python/object:os.system {}",
        b"1: 2\na: 3",
        b"a: &a [*a]\n",
    ],
)
def test_a_broken_file_is_a_run_state_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(TrainctlError, match=r"config\.yaml") as caught:
        load_config(path)
    assert caught.value.exit_code is ExitCode.run_state


@pytest.mark.parametrize("content", ["model: {family: nope}", "optimizer: {kind: nope}"])
def test_an_option_that_is_not_here_is_named_with_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(TrainctlError, match=r"config\.yaml: .* has no kind 'nope' here") as caught:
        load_config(tmp_path / "config.yaml")
    assert caught.value.exit_code is ExitCode.environment


def test_a_missing_file_is_a_run_state_error(tmp_path: Path) -> None:
    with pytest.raises(TrainctlError, match="No such file") as caught:
        load_config(tmp_path / "config.yaml")
    assert caught.value.exit_code is ExitCode.run_state


def test_diff_lists_every_changed_key() -> None:
    left, right = RunConfig(), RunConfig()
    assert diff_configs(left, right) == []
    right.training.seed = 2
    right.deepspeed = {"a": 1}
    assert diff_configs(left, right) == [
        Change("training.seed", 1234, 2),
        Change("deepspeed", {}, {"a": 1}),
    ]


def test_an_older_run_with_a_table_of_tensors_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    written = RunConfig()
    path.write_text(dump_config(written).replace("  anatomy: []\n", "  tensors: []\n"))
    assert "  tensors: []" in path.read_text()
    assert load_config(path) == written


def test_the_plan_of_an_older_run_is_read() -> None:
    plain = to_plain(RunConfig())
    plain["model"]["tensors"] = ["norm.weight 64"]
    assert from_plain(RunConfig, plain) == RunConfig()
