"""The README is true: its commands run as they are written, and print what it shows.

Fenced `console` blocks are run in an empty folder, as the note in the HTML comment above says.
None: the output under each command is compared (`TRAINCTL_UPDATE_GOLDEN=1` writes it anew);
`stdout`: without messages, which depend on this machine's Python library, the text to train on;
`output …`: the output is not compared; `slow`: it trains; `fine-tunes`: it trains the model in DIR
on chat.jsonl, which the test makes; `not run: …`: it is left out.
`# exit 3` after a command says that it is meant to fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```console\n(?P<body>.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)(?P<path>[^)#]+)")


@dataclass(frozen=True)
class Block:
    note: str
    body: str

    @property
    def commands(self) -> list[str]:
        return [line[2:] for line in self.body.splitlines() if line.startswith("$ ")]


def blocks(*notes: str) -> list[Block]:
    """Blocks whose note starts with one of these; an empty string means no note."""
    found = [Block(m["note"] or "", m["body"]) for m in BLOCK.finditer(README.read_text())]
    return [
        block
        for block in found
        if any(block.note.startswith(note) if note else not block.note for note in notes)
    ]


def run(commands: list[str], folder: Path, *, messages: int = subprocess.STDOUT) -> str:
    """Run the commands and give a transcript in the README's form."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    transcript = ""
    for command in commands:
        expected = re.search(r"# exit (\d+)$", command)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
        )
        assert done.returncode == int(expected[1] if expected else 0), done.stdout
        transcript += f"$ {command}\n{done.stdout}"
    return re.sub(r" +$", "", transcript, flags=re.MULTILINE)


def first_command(block: Block) -> str:
    return block.commands[0]


@pytest.mark.parametrize("block", blocks("", "stdout"), ids=first_command)
def test_the_output_is_as_shown(block: Block, tmp_path: Path) -> None:
    messages = subprocess.DEVNULL if block.note else subprocess.STDOUT
    transcript = run(block.commands, tmp_path, messages=messages)
    if os.environ.get("TRAINCTL_UPDATE_GOLDEN"):
        README.write_text(README.read_text().replace(block.body, transcript))
    else:
        assert transcript == block.body


@pytest.mark.parametrize("block", blocks("output"), ids=first_command)
def test_commands_that_plan_run(block: Block, tmp_path: Path) -> None:
    run(block.commands, tmp_path)


def test_the_recipe_of_the_users_is_valid(tmp_path: Path) -> None:
    match = re.search(r"```yaml\n# (recipes/(\w+)\.yaml)\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None
    (tmp_path / match[1]).parent.mkdir()
    (tmp_path / match[1]).write_text(match[3])
    run([f"trainctl validate recipe={match[2]}"], tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_commands_that_train_run(tmp_path: Path) -> None:
    """Blocks run in turn in one folder, as for somebody who reads on.

    A launch that an earlier block made is not repeated, and after the first run the recipe takes
    seconds.
    """
    from small_recipe import write_small_tiny

    commands = [command for block in blocks("slow") for command in block.commands]
    first, *others = dict.fromkeys(commands)
    run([first], tmp_path)
    write_small_tiny(tmp_path)
    run(others, tmp_path)
    assert commands[0] == "trainctl launch recipe=tiny"  # the whole run: it has learnt
    (events,) = (path for path in tmp_path.glob("runs/*/events.jsonl") if "mine" not in path.parts)
    found = [json.loads(line) for line in events.open()]
    last = [event for event in found if event["event"] == "evaluation"][-1]
    assert last["step"] == 160 and last["loss"] < last["unigram_entropy"]


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_commands_that_fine_tune_run(tmp_path: Path) -> None:
    from small_chat_model import questions, write_base, write_chat  # with torch

    (block,) = blocks("fine-tunes")
    write_base(tmp_path / "DIR", steps=20)
    write_chat(tmp_path / "chat.jsonl", questions()[0])
    transcript = run(block.commands, tmp_path)
    assert "<|im_start|>assistant\n  | [[" in transcript  # before there is a run
    assert "conversations to train on" in transcript
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_every_block_is_of_a_known_kind() -> None:
    assert len(blocks("", "stdout", "output", "slow", "fine-tunes", "not run: ")) == len(
        list(BLOCK.finditer(README.read_text()))
    )


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda page: page.name
)
def test_relative_links_exist(page: Path) -> None:
    for match in LINK.finditer(page.read_text()):
        assert (page.parent / match["path"]).exists(), match["path"]
