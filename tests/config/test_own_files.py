"""Tests of which files count as the user's code, to be compared between hosts."""

from __future__ import annotations

from pathlib import Path

from trainctl.config.schema import RunConfig
from trainctl.config.user_code import user_code_files

FILES = {
    "own.py": "import json, torch\nimport helper\nfrom pkg.inner import work as w\nimport nowhere",
    "helper.py": "import own\n\ndef later():\n    import late.deep.module\n",
    "late/deep/module.py": "",  # namespace packages above it
    "pkg/__init__.py": "",
    "pkg/inner/__init__.py": "from ..base import thing\nfrom . import sibling",
    "pkg/inner/work.py": "from .sibling import *\nfrom ... import too_far",
    "pkg/inner/sibling.py": "this is no Python",
    "pkg/inner/unused.py": "",
    "pkg/base.py": "from trainctl.config import schema",
    "unused.py": "",
}
EXPECTED = {
    "pkg/__init__.py",
    "pkg/inner/__init__.py",
    "pkg/inner/work.py",
    "pkg/inner/sibling.py",
    "pkg/base.py",
}


def make(folder: Path) -> None:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def found(config: RunConfig, folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in user_code_files(config, folder)}


def test_a_script_with_all_that_it_imports(tmp_path: Path) -> None:
    make(tmp_path)
    config = RunConfig()
    assert user_code_files(config, tmp_path) == []
    config.script = str(tmp_path / "own.py")
    expected = EXPECTED | {"own.py", "helper.py", "late/deep/module.py"}
    assert found(config, tmp_path) == expected
    # It looks beside itself, wherever it is started.
    assert set(user_code_files(config, Path("/"))) == {tmp_path / name for name in expected}


def test_modules_of_functions_and_their_packages(tmp_path: Path) -> None:
    make(tmp_path)
    config = RunConfig()
    config.model.factory = "pkg.inner.work:model"
    config.data.factory = "unused:text"
    config.trainer = "json:dumps"  # installed
    assert found(config, tmp_path) == EXPECTED | {"unused.py"}


def test_a_program_that_is_no_python(tmp_path: Path) -> None:
    program = tmp_path / "train.sh"
    program.write_text("import helper\n")
    config = RunConfig()
    config.script = str(program)
    assert user_code_files(config, tmp_path) == [program]
