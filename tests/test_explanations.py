"""Everything that trainctl says by a word is explained, and every example is true."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.config.schema import OnBadLoss
from trainctl.errors import ExitCode
from trainctl.rules.handbook import (
    EXIT_CODE,
    FAILURE,
    INTERVENTION,
    JSON_PAGE,
    PLAN_PAGE,
    POLICY,
    RECORD,
    RULE,
    SITE,
    Meaning,
    all_meanings,
    explain,
    hint_line,
    page_address,
)
from trainctl.runs.failures import Cause

ROOT = Path(__file__).parents[1]
LONG_TEXT = 60
"""Characters from which a text is nobody else's by chance."""
SOURCES = list((ROOT / "trainctl").rglob("*.py"))


def of_kind(kind: str) -> dict[str, Meaning]:
    """Return the explanations of one kind by their words."""
    return {each.word: each for each in all_meanings() if each.kind.startswith(kind)}


@functools.cache
def trees() -> list[ast.Module]:
    """Return the parsed sources."""
    return [ast.parse(path.read_text()) for path in SOURCES]


def test_every_word_has_an_entry_and_nothing_else_has() -> None:
    used = {name for path in SOURCES for name in re.findall(r'"(TC\d{3})"', path.read_text())}
    assert set(of_kind(RULE)) == used
    assert set(of_kind(EXIT_CODE)) == {str(int(code)) for code in ExitCode}
    assert set(of_kind(FAILURE)) == {cause.value for cause in Cause}
    assert set(of_kind(POLICY)) == {policy.value for policy in OnBadLoss}
    kinds = next(
        node
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and node.name == "BadStepKind"
        and "loss" in ast.dump(node)
    )
    named = {item.targets[0].id for item in kinds.body if isinstance(item, ast.Assign)}
    assert set(of_kind(INTERVENTION)) == named


def test_every_word_stands_for_one_thing() -> None:
    words = [each.word.lower() for each in all_meanings()]
    assert len(set(words)) == len(words)


def test_every_entry_says_why_what_and_what_to_do() -> None:
    for name, rule in of_kind(RULE).items():
        assert rule.meaning and rule.cause and rule.cure and all(rule.printed), name
        assert rule.typed or rule.situation, name
        assert not rule.meaning.endswith("."), name
    for kind in (FAILURE, INTERVENTION, POLICY, EXIT_CODE):
        for word, found in of_kind(kind).items():
            assert found.meaning and found.cause and found.printed and found.cure, word
    for word, found in of_kind(RECORD).items():
        assert found.meaning and found.fields is not None, word


def written_records() -> Iterator[tuple[str, set[str]]]:
    """Yield each kind of record that code writes, with the fields named there."""
    for tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("write", "_write", "record", "_record") or not node.args:
                continue
            if ast.unparse(node.func.value) == "context":  # names within records of callbacks
                continue
            for kind in ast.walk(node.args[0]):
                named = isinstance(kind, ast.Constant) and str(kind.value)
                if named and re.fullmatch("[a-z_]+", named):
                    yield kind.value, {item.arg for item in node.keywords if item.arg}


def test_every_kind_of_record_and_field_that_is_written_is_explained() -> None:
    found = list(written_records())
    explained = of_kind(RECORD)
    assert {kind for kind, _ in found} == set(explained)
    for kind, fields in found:
        assert fields <= set(explained[kind].fields or {}), kind


def pieces() -> set[tuple[str, ...]]:
    """Return the texts in the code. The parts of an f-string are separate, without its values."""
    found = set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        words = [part.value for part in parts if isinstance(part, ast.Constant)]
        if all(isinstance(word, str) for word in words) and sum(map(len, words)) >= 8:
            found.add(tuple(words))
    return found


def own_letters(piece: tuple[str, ...], message: str) -> int:
    """Count the letters of a message that come from the code's text; 0 if the text is not in it."""
    at = 0
    for word in piece:
        at = message.find(word, at)
        if at < 0:
            return 0
        at += len(word)
    return sum(map(len, piece))


def test_documented_messages_match_the_code() -> None:
    known = pieces()
    for name, rule in of_kind(RULE).items():
        if not rule.typed and rule.page != JSON_PAGE:
            (message,) = rule.printed
            own = max((own_letters(each, message) for each in known), default=0)
            assert own >= len(message) / 5, (name, message)


@pytest.mark.slow
def test_every_example_brings_its_rule_about_and_prints_what_is_shown() -> None:
    """Each example is run again in a folder of its own."""
    command = [sys.executable, ROOT / "scripts" / "generate_rules.py", "--check", "--all"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_texts_live_once() -> None:
    """A rule's text is in its docstring alone; what a page says by hand is not in the code."""
    sources = [" ".join(path.read_text().split()) for path in SOURCES]
    for each in all_meanings():
        made = each.page in (JSON_PAGE, PLAN_PAGE)
        cause = each.cause.partition(" DeepSpeed ")[0] if made else each.cause
        for text in (each.meaning, cause, each.cure):
            if len(text) > LONG_TEXT:
                assert sum(text in source for source in sources) <= made, (each.word, text)


def test_explain_says_it_in_words_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "tc024", "intervention", "device_memory", "exit", "code", "75"]) == 0
    shown = capsys.readouterr().out
    for words in ("TC024: rule, warning", "schedule.warmup_steps=200", "suspects", "EX_TEMPFAIL"):
        assert words in shown
    assert run(["explain", "TC024", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["explanations"]
    assert found["address"] == "docs/troubleshooting/rules-of-the-plan.md#tc024"
    assert run(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(all_meanings())


@pytest.mark.parametrize(
    ("word", "near"),
    [("TC24", "TC024"), ("evaluaton", "evaluation"), ("24", "TC024")],
)
def test_an_unknown_word_has_the_nearest(
    word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", word]) == ExitCode.bad_input
    assert f"did you mean {near}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("phrase", "found"),
    [
        ("wandb", {"logging.wandb.project", "docs/metrics.md#weights--biases"}),
        ("docker", {"docs/install.md#container"}),
        ("learning rate per layer", {"optimizer.layer_lr_decay", "docs/optimizers.md"}),
        ("optimizer.lr", {"optimizer.lr"}),
        ("muon", {"optimizer=muon", "docs/optimizers.md"}),
        ("device", {"device_memory", "hardware.device_memory_bytes"}),
        ("devices per node", {"hardware.devices_per_node"}),
        ("GPUs per node", {"hardware.devices_per_node"}),
        ("max_steps", {"training.steps"}),
        ("filter of web pages fineweb", {"docs/data-quality.md"}),
    ],
)
def test_other_words_are_looked_for_among_keys_options_and_pages(
    phrase: str, found: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", *phrase.split(), "--json"]) == 0
    explanations = json.loads(capsys.readouterr().out)["explanations"]
    shown = {each[name] for each in explanations for name in ("word", "address")}
    shown |= {each["address"].partition("#")[0] for each in explanations}
    assert found <= shown
    if "." in phrase:
        assert explanations[0]["word"] == phrase
    for each in explanations:
        path, _, anchor = each["address"].partition("#")
        headings = re.findall(r"^#+ (?:Exit code )?(.+)$", (ROOT / path).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings}
        assert anchor in slugs, each["address"]


def test_config_why_names_what_explain_finds(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["wandb"], ["wandb", "recipe=tiny"]):
        assert run(["config", "why", *words]) == ExitCode.bad_input
        assert "`trainctl explain wandb` finds" in capsys.readouterr().err
    assert run(["config", "why", "docker", "recipe=tiny"]) == ExitCode.bad_input
    assert "`trainctl explain docker` finds" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["\u00b2", "\u0663\u0663\u0663", "1" * 5000])
def test_what_only_looks_like_a_code_is_unknown(word: str) -> None:
    assert explain(word) is None


def test_a_signals_code_is_explained() -> None:
    found = explain("137")
    assert found is not None and "SIGKILL" in found.meaning
    assert explain("255") is None


def test_a_message_names_the_page_of_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hint_line(["TC024"]) == "trainctl explain TC024"
    monkeypatch.setenv(SITE, "https://docs.example.org/trainctl/")
    page = "https://docs.example.org/trainctl/troubleshooting/rules-of-the-plan.html#tc024"
    assert hint_line(["TC024"]) == f"trainctl explain TC024, {page}"
    many = "trainctl explain TC024 TC150, https://docs.example.org/trainctl/rules.html"
    assert hint_line(["TC024", "TC150"]) == many


def test_every_address_is_a_heading_of_its_page() -> None:
    for found in all_meanings():
        path, _, anchor = page_address(found).partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
        slugs = {heading.lower().replace(" ", "-") for heading in headings}
        assert anchor in slugs, found.word


def test_common_fields_are_no_fields_of_a_kind() -> None:
    page = (ROOT / "docs" / "records.md").read_text().partition("\n## ")[0]
    common = set(re.findall(r"`(\w+)`", page.splitlines()[-1]))
    assert common == {"attempt", "time", "schema", "event"}
    assert not any(common & set(record.fields or {}) for record in of_kind(RECORD).values())
