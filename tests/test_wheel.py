"""The built wheel: what is inside, and that it trains in an empty folder.

The wheel is installed into an empty environment, which reads the dependencies from the environment
of the tests through a .pth file: nothing is downloaded, and the checkout is not on its path.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from trainctl.rules.handbook import PAGES

ROOT = Path(__file__).parents[1]
EXAMPLES = "trainctl/examples"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Virtual environment that has the wheel and no checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    subprocess.run([*install, wheel], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_configuration_is_inside(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes"):
        for path in (ROOT / folder).rglob("*.yaml"):
            assert f"trainctl/_shipped/{path.relative_to(ROOT).as_posix()}" in names
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    pages |= {f"docs/{page}.md" for page in PAGES}
    assert {f"trainctl/_shipped/{page}" for page in pages} <= names
    examples = (ROOT / EXAMPLES).glob("[!_]*/*.*")
    assert {path.relative_to(ROOT).as_posix() for path in examples} <= names
    for path in (ROOT / "trainctl").rglob("assets/**/*"):
        assert path.is_dir() or path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith(("tests/", "conf/", "recipes/"))]


def test_it_trains_in_an_empty_folder_without_a_compiler(environment: Path, tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    # A home without torch's cache of built extensions, and a PATH without compilers.
    variables = {"HOME": str(home), "PATH": str(environment / "bin"), "LANG": "C.UTF-8"}
    for compiler in ("cc", "gcc", "c++", "g++", "clang", "nvcc"):
        assert shutil.which(compiler, path=variables["PATH"]) is None

    def run(program: str, *arguments: str) -> str:
        command = [environment / "bin" / program, *arguments]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("trainctl", "new", "optimizer", "mine")
    own = ("--config-dir", ".", "optimizer=mine")
    assert run("trainctl", "validate", "--trust-code", *own, "recipe=tiny").startswith("tiny is")
    imported = run("python", "-c", "import trainctl; print(trainctl.__file__)")
    assert Path(imported.strip()).is_relative_to(environment)
    small = (
        "training.sequence_length=128",
        "training.global_batch_size=8",
        "training.evaluation_samples=2",
        "training.sample_tokens=4",
    )
    output = run("trainctl", "launch", "recipe=tiny", *small, "training.stop_after_steps=20")
    (run_directory,) = (folder / "runs").iterdir()
    assert output.splitlines()[-1] == f"run directory: {run_directory}"
    with (run_directory / "steps" / "attempt-1.csv").open(newline="") as stream:
        losses = [float(row["loss"]) for row in csv.DictReader(stream)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
    assert not list(home.rglob("torch_extensions"))
