"""The user's script and functions, as far as they are looked at without running them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainctl.config.catalog import shipped_root
from trainctl.config.compose import ComposedConfig, compose
from trainctl.config.user_code import (
    check_user_code,
    ignored_trainer_settings,
    user_code_files,
    with_script_arguments,
)
from trainctl.tuning.input_files import missing_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(*overrides: str, words: list[str] | None = None) -> ComposedConfig:
    return with_script_arguments(compose(["recipe=tiny", *overrides]), words)


def findings(*overrides: str) -> list[tuple[str, str, str]]:
    found = check_user_code(made(*overrides).config)
    return [(finding.rule, finding.key, f"{finding.message} {finding.hint}") for finding in found]


def test_words_are_the_script_s_whatever_they_look_like(folder: Path) -> None:
    words = ["--lr", "1e-3", "${training.steps}", "~x", "a=1,2", "'", '"', "--"]
    composed = made("script=train.py", words=words)
    assert composed.config.script_arguments == words
    assert composed.config.script == str(folder / "train.py")
    assert composed.source_of("script_arguments") == "the words after --"
    assert made("script=train.py", "script_arguments=[a]").config.script_arguments == ["a"]
    assert made("script=train.py", "script_arguments=[a]", words=[]).config.script_arguments == []


def test_a_function_may_be_in_folders_that_are_no_packages(folder: Path) -> None:
    (folder / "plain" / "deeper").mkdir(parents=True)
    (folder / "plain" / "deeper" / "mine.py").write_text("def train(plan, rank): ...\n")
    assert findings("trainer=plain.deeper.mine:train") == []
    ((rule, _, message),) = findings("trainer=plain.deeper.other:train")
    assert rule == "TC117" and "no module plain.deeper.other" in message


def test_a_script_must_be_there_and_startable(folder: Path) -> None:
    assert findings("script=train.py")[0][:2] == ("TC116", "script")
    (folder / "train.py").write_text("")
    (folder / "train.sh").write_text("")
    assert findings("script=train.py") == []
    ((_, _, text),) = findings("script=train.sh")
    assert "chmod +x" in text
    (folder / "train.sh").chmod(0o755)
    assert findings("script=train.sh") == []
    ((_, _, text),) = findings(f"script={folder}")
    assert "is not a file" in text


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("train", "module:function"),
        ("train.py:main", "write the module's name: train:main"),
        ("a b:c", "module:function"),
        ("json:load", ""),
        ("sys:exit", ""),
        ("math:cos", ""),
        ("no_such_module:f", "there is no module no_such_module"),
        ("os.path.deeper:f", "there is no module os.path"),
        ("package.inner:f", ""),
        ("package.inner:g", "did you mean package.inner:gg"),
        ("package.innner:f", "there is no module package.innner"),
        ("package.starred:anything", ""),
        ("package.lazy:anything", ""),
        ("package.broken:anything", ""),
        ("package:f", "defines no f"),
    ],
)
def test_a_function_is_found_without_importing_it(
    folder: Path, reference: str, expected: str
) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "inner.py").write_text(
        "raise SystemExit('imported')\nif True:\n    def f(): pass\ngg = len\n"
    )
    (package / "starred.py").write_text("from os import *\n")
    (package / "lazy.py").write_text("def __getattr__(name): return len\n")
    (package / "broken.py").write_text("def f(:\n")
    for key in ("trainer", "model.factory", "data.factory"):
        found = findings(f'{key}="{reference}"')
        assert [(rule, about) for rule, about, _ in found] == ([("TC117", key)] if expected else [])
        assert all(expected in text for _, _, text in found)


@pytest.mark.filterwarnings("error")
def test_what_python_warns_of_is_not_said_here(folder: Path) -> None:
    """Since Python 3.12 that of an escape sequence is printed by default."""
    (folder / "escapes.py").write_text("DIGITS = '\\d+'\nimport beside\n")
    (folder / "beside.py").write_text("")
    assert [rule for rule, _, _ in findings("trainer=escapes:gone")] == ["TC117"]
    config = made("trainer=escapes:DIGITS").config
    assert user_code_files(config, folder) == [folder / "beside.py", folder / "escapes.py"]


def test_the_folder_of_the_run_is_searched_on_a_resume(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.py").write_text("def train(plan, rank): pass\n")
    config = made("trainer=own:train").config
    assert [finding.rule for finding in missing_files(config)] == ["TC117"]
    assert missing_files(config, elsewhere) == []


def test_script_and_trainer_exclude_each_other(folder: Path) -> None:
    (folder / "train.py").write_text("def main(): pass\n")
    assert [f[0] for f in findings("script=train.py", "trainer=train:main")] == ["TC118"]
    composed = made(words=["--lr", "1"])
    (finding,) = check_user_code(composed.config)
    assert (finding.rule, finding.key) == ("TC118", "script_arguments")


def test_the_corpus_of_a_script_is_not_checked(folder: Path) -> None:
    (folder / "train.py").write_text("")
    typed = ["data=files", "data.paths=[nothing/*.txt]"]
    assert [finding.rule for finding in missing_files(made(*typed).config)] == ["TC115"]
    assert missing_files(made("script=train.py", *typed).config) == []


def test_what_only_our_trainer_does_is_reported() -> None:
    assert ignored_trainer_settings(made("checkpoint.keep=2")) == []
    typed = ["script=train.py", "checkpoint.keep=2", "optimizer.lr=1e-3", "schedule=constant"]
    found = ignored_trainer_settings(made(*typed, "schedule.warmup_steps=0"))
    assert {(f.key, f.source) for f in found} == {
        ("schedule.warmup_steps", "schedule.warmup_steps=0"),
        ("checkpoint.keep", "checkpoint.keep=2"),
    }
    assert not any(f.is_error for f in found)
    (finding,) = ignored_trainer_settings(made("script=train.py"))
    assert finding.key == "schedule" and "no scheduler" in finding.message
    assert (
        ignored_trainer_settings(made("script=train.py", "deepspeed.scheduler.type=WarmupLR")) == []
    )


def test_a_json_of_the_script_s_own_is_reported() -> None:
    words = ["--deepspeed_config", "mine.json"]
    found = ignored_trainer_settings(made("script=train.py", "schedule=constant", words=words))
    (finding,) = [each for each in found if each.key == "script_arguments"]
    assert "not what it trains with" in finding.message
    assert finding.source == "the words after --"


def test_nothing_that_is_shipped_names_code() -> None:
    shipped = shipped_root()
    for path in (*shipped.glob("conf/**/*.yaml"), *shipped.glob("recipes/*.yaml")):
        # `key: value`, with or without a value; `null` names nothing.
        named = re.findall(
            r"^ *(?:factory|script|trainer): *(?!null\b)(\S.*)", path.read_text(), re.M
        )
        assert not named, path
