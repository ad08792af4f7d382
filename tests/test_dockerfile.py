"""The Dockerfile: only apt and pip fetch anything, and its steps make a wheel that installs.

Docker is not needed: the file is parsed, and the steps of the stage `wheel` run in a copy of the
repository with a clean virtual environment. That the image can be built is tested by nobody.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from trainctl.config.registry import load_specs

ROOT = Path(__file__).parents[1]
PROGRAMS = {"apt-get", "install", "pip", "python", "python3", "rm", "useradd"}
"""Programs that RUN may start. Of these, only apt-get and pip fetch anything."""
FLAGS = re.compile(r"^(?:--\S+\s+)+")
REMOTE = re.compile(
    r"://|\b(?:curl|wget|git clone)\b|--(?:extra-)?index-url|--find-links|\s-[if]\s"
)


@dataclass
class Stage:
    image: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.steps if name == instruction]


def parsed() -> tuple[list[str], dict[str, Stage]]:
    """Return the arguments before the first stage, and the stages by name."""
    parser = DockerfileParser(path=str(ROOT / "Dockerfile"))
    arguments, stages = [], {}
    current = None
    for step in parser.structure:
        name, value = step["instruction"], step["value"]
        if name == "FROM":
            image, _, stage = value.partition(" AS ")
            current = stages[stage] = Stage(image)
        elif current is not None:
            current.steps.append((name, value))
        elif name == "ARG":
            arguments.append(value)
    return arguments, stages


ARGUMENTS, STAGES = parsed()


def commands(value: str) -> list[list[str]]:
    """Return the words of each command of a RUN, without the variables before it."""
    found = [shlex.split(part) for part in FLAGS.sub("", value).split("&&")]
    return [
        words[next(i for i, word in enumerate(words) if not re.match(r"\w+=", word)) :]
        for words in found
    ]


def test_images_are_arguments_or_stages() -> None:
    declared = {argument.partition("=")[0] for argument in ARGUMENTS}
    known: set[str] = set()
    for name, stage in STAGES.items():
        assert stage.image in known or stage.image.strip("${}") in declared
        known.add(name)
    assert all("=" in argument for argument in ARGUMENTS), "without a default"


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_only_apt_and_pip_fetch_anything(stage: Stage) -> None:
    assert not stage.values("ADD"), "COPY does the same and cannot fetch a URL"
    for value in stage.values("COPY"):
        assert "://" not in value
        origin = re.match(r"--from=(\S+)", value)
        assert origin is None or origin[1] in STAGES
    for value in stage.values("RUN"):
        assert not REMOTE.search(FLAGS.sub("", value)), value
        for words in commands(value):
            assert words[0] in PROGRAMS, words[0]
            if words[0] == "apt-get":
                assert words[1] in ("update", "install")
            if words[0].startswith("python"):
                assert words[1:3] in (["-m", "venv"], ["-m", "build"])


def test_it_ends_as_a_user_without_rights() -> None:
    last = [*STAGES.values()][-1]
    assert last.values("USER") == ["trainctl"]
    started = [words for run in STAGES["base"].values("RUN") for words in commands(run)]
    assert [words for words in started if words[0] == "useradd" and words[-1] == "trainctl"]


def test_every_operator_that_an_option_may_need_is_compiled() -> None:
    (compiling,) = (run for run in STAGES["installed"].values("RUN") if "DS_BUILD" in run)
    specs = load_specs("optimizer")
    named = {name for each in specs for name in (each.host_operator, each.device_operator) if name}
    wanted = {name.upper() for name in named} | {"AIO", "QUANTIZER"}
    wanted |= {"FUSED_ADAM"}  # which DeepSpeed takes for a program of the user's
    assert set(re.findall(r"DS_BUILD_(\w+)=1", compiling)) == wanted
    assert "--mount=type=cache,target=/root/.cache/ccache" in compiling
    assert "CCACHE_DIR=/root/.cache/ccache" in compiling


def test_the_devcontainer_is_a_stage() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve().is_file()
    assert container["build"]["target"] in STAGES
    assert container["remoteUser"] == "trainctl"
    target = container["postCreateCommand"].removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def add_packages_of_the_tests(environment: Path, folder: Path) -> None:
    """Let an environment read the packages of the tests, except trainctl, without changing them."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "trainctl" not in path.name:
            (folder / path.name).symlink_to(path)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{folder}\n")


@pytest.mark.slow
def test_the_steps_make_a_wheel_that_installs(tmp_path: Path) -> None:
    """COPY and RUN of the stage `wheel`, then the installation.

    The stage runs in an empty environment. The installation finds the packages of the tests there,
    except trainctl.
    """
    environment, source = tmp_path / "environment", tmp_path / "source"
    venv.create(environment, with_pip=True)
    variables = {
        **os.environ,
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_NO_COMPILE": "1",
        "EXTRAS": "data",
    }
    source.mkdir()
    for value in STAGES["wheel"].values("COPY"):
        *origins, target = value.split()
        for origin in origins:
            place = source / target / (origin if target == "./" else "")
            if (ROOT / origin).is_dir():
                shutil.copytree(ROOT / origin, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / origin, place)
    install = next(run for run in STAGES["installed"].values("RUN") if "EXTRAS" in run)
    for value in (*STAGES["wheel"].values("RUN"), install):
        if value is install:
            add_packages_of_the_tests(environment, tmp_path / "linked")
        subprocess.run(["sh", "-ec", FLAGS.sub("", value)], cwd=source, env=variables, check=True)
    chosen = ("data=parquet", "data.paths=[a.parquet]")
    done = subprocess.run(
        [environment / "bin" / "trainctl", "doctor", "recipe=tiny", *chosen],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "extras: data (pyarrow" in done.stdout
