"""Pages that are written by a script are up to date, and hand-written tables are complete."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from trainctl.cli.main import app
from trainctl.config.compose import compose_leniently
from trainctl.errors import ExitCode
from trainctl.rules.handbook import JSON_PAGE, PLAN_PAGE, READING_PAGE

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "script",
    [
        "generate_reference.py",
        "generate_rules.py",
        "generate_optimizers.py",
        "generate_coming_from.py",
    ],
)
def test_a_written_page_is_up_to_date(script: str) -> None:
    command = [sys.executable, ROOT / "scripts" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


def test_every_identifier_of_a_finding_is_documented() -> None:
    page = (ROOT / "docs" / "rules.md").read_text()
    sources = [path.read_text() for path in (ROOT / "trainctl").rglob("*.py")]
    used = {name for source in sources for name in re.findall(r'"(TC\d{3})"', source)}
    assert used == set(re.findall(r"^\| (TC\d{3}) \|", page, re.MULTILINE))


PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if path.name != "CHANGELOG.md"  # what it says was true then
)
RUN_ELSEWHERE = {f"{Path(page).name}.md" for page in (JSON_PAGE, PLAN_PAGE, READING_PAGE)}
"""Pages whose every command is run by tests/test_explanations.py: most are meant to fail."""
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^ {4}trainctl (?:.*\\\n)*.*$", re.MULTILINE)
INLINE = re.compile(r"`(trainctl\b[^`]*)`")
OPTIONAL = re.compile(r"\[(?:[A-Z|]+|[\w.]+=\.\.\.)\](?:\.\.\.)?")
"""A part of a usage line that may be left out: `[RUN]`, `[RECIPE|RUN]`, `[hardware=...]`."""


def typed_commands(page: str) -> Iterator[list[str]]:
    """Words after `trainctl` of every command that a page shows as typed into a shell."""
    blocks = [*FENCED.findall(page), *INDENTED.findall(FENCED.sub("", page))]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        text = line.strip().removeprefix("$ ")
        for part in re.split(r"\s(?:&&|\|\|?|;)\s", text):
            if part.startswith("trainctl ") and "──" not in part and "# exit" not in part:
                yield shlex.split(part, comments=True)[1:]


def mentioned_commands(page: str) -> Iterator[list[str]]:
    """Words after `trainctl` of every mention in the text, without what stands for others' words;
    one for each of `ls|status`."""
    for text in INLINE.findall(FENCED.sub("", page)):
        text = OPTIONAL.sub("", text.replace("\\|", "|")).replace("...", "")
        text = re.sub(r"\[(--?[^\]]*)\]", r"\1", text)
        words = shlex.split(text)[1:]
        choices = [word.split("|") if re.fullmatch(r"[a-z|]+", word) else [word] for word in words]
        yield from (list(each) for each in itertools.product(*choices))


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the words name, and the remaining words."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while rest and not rest[0].startswith("-") and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"there is no command {rest[0]!r} in {command.name}"
        _, command, rest = command.resolve_command(typer.Context(command), rest)
    return command, rest


def options_of(command: Any) -> set[str]:
    """Every option that a command takes."""
    with command.make_context("trainctl", [], resilient_parsing=True) as context:
        parameters = command.get_params(context)
    return {name for item in parameters for name in (*item.opts, *item.secondary_opts)}


def check_options(command: Any, words: list[str]) -> None:
    given = [word.partition("=")[0] for word in itertools.takewhile(lambda w: w != "--", words)]
    unknown = {word for word in given if word.startswith("-")} - options_of(command)
    assert not unknown, f"{command.name} has no {unknown}"


def check_overrides(words: list[str]) -> None:
    """They compose; of a key with several values, the first."""
    own = list(itertools.takewhile(lambda word: word != "--", words))
    overrides = [word for word in own if re.match(r"[~+]?[\w.]+=", word) and "=DIR" not in word]
    overrides = [re.sub(r"=([^\[{,]+),.*", r"=\1", word) for word in overrides]
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    target = [f"recipe={word}" for word in own if word in recipes][:1]
    found = compose_leniently([*target, *overrides]).findings
    # A directory of the reader's is not there, nor the example of docs/callbacks.md.
    wrong = [each for each in found if each.is_error and each.key != "model.path"]
    wrong = [each for each in wrong if "per_parameter" not in each.message]
    assert not wrong, [each.message for each in wrong]


def made_folders(page: str) -> Iterator[str]:
    """Yield folders that the shown commands make, but those of a reader's run (`runs/NAME`)."""
    for words in typed_commands(page):
        own = list(itertools.takewhile(lambda word: word != "--", words))
        if "--dry-run" in own or "--resume" in own:
            continue
        places = [own[own.index("--run-dir") + 1]] if "--run-dir" in own else []
        places += own[1:3] if own[0] == "export" else []
        if not any(re.search("[A-Z]", place) for place in places):
            yield from places[-1:]


def test_no_two_pages_make_the_same_folder() -> None:
    """Somebody reads the README, then the tutorial, and types both."""
    made = [(page.name, folder) for page in PAGES for folder in set(made_folders(page.read_text()))]
    shared = {
        folder: [page for page, own in made if own == folder]
        for _, folder in made
        if [own for _, own in made].count(folder) > 1
    }
    assert len(made) > 8 and not shared


def test_a_page_that_installs_a_wheel_says_where_it_comes_from() -> None:
    readme, install = ((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
    for page in (readme, install):
        (block,) = (text for text in FENCED.findall(page) if "pip install trainctl-*.whl" in text)
        assert block.index("pip wheel --no-deps CHECKOUT") < block.index("pip install trainctl-*")
    assert "pip install torch --index-url https://download.pytorch.org/whl/cpu" in install


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_that_is_shown_is_one(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed by the real command line and composed by the real configuration; nothing starts."""
    monkeypatch.chdir(ROOT / "docs" / "examples")  # whose scripts and functions some name
    text = page.read_text()
    for words in mentioned_commands(text):
        check_options(*command_of(words))
    for words in typed_commands(text) if page.name not in RUN_ELSEWHERE else ():
        command, rest = command_of(words)
        with command.make_context("trainctl", list(rest)):
            pass
        check_overrides(rest)


def test_a_command_that_does_not_exist_would_be_seen() -> None:
    page = "`trainctl runs tail` and\n```console\n$ trainctl launch recipe=tiny --dry\n```\n"
    (words,) = mentioned_commands(page)
    with pytest.raises(AssertionError, match="no command 'tail'"):
        command_of(words)
    (words,) = typed_commands(page)
    with pytest.raises(AssertionError, match="--dry"):
        check_options(*command_of(words))
    with pytest.raises(AssertionError, match="optimizer"):
        check_overrides(["optimizer.lrate=1"])


SOURCES = list((ROOT / "trainctl").rglob("*.py"))
SAID = re.compile(r"(?:`|hint=f?[\"'])trainctl ([a-z][a-z-]*(?: [a-z-]+)*)")


def test_every_command_that_a_message_names_exists() -> None:
    """Messages name commands in hints and between backticks."""
    said = {text for path in SOURCES for text in SAID.findall(path.read_text())}
    assert len(said) > 10
    for text in said:
        command_of(text.split())


ROOMS = "|".join(path.name for path in sorted((ROOT / "trainctl").iterdir()) if path.is_dir())
OF_THE_PACKAGE = re.compile(rf"(?<![\w/])(?:trainctl/|`(?=(?:{ROOMS})/))([\w/]+\.py)\b")
EXAMPLES = {"options/GROUP/__init__.py", "options/optimizer/mine.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = set(OF_THE_PACKAGE.findall(page.read_text())) - EXAMPLES
    assert not [
        name for name in named if "NAME" not in name and not (ROOT / "trainctl" / name).exists()
    ]
