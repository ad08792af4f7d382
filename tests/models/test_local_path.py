"""Paths as users write them: no form of one stops a command."""

from __future__ import annotations

from pathlib import Path

import trainctl
from trainctl.models.local_path import is_file, is_folder, is_there, local_path


def test_a_path_that_the_system_refuses_is_not_there(tmp_path):
    assert local_path("~/x") == Path.home() / "x"
    assert local_path("~nobody-there/x") == Path("~nobody-there/x")
    file = tmp_path / "file"
    file.write_text("")
    assert is_there(file) and is_file(file) and not is_folder(file) and is_folder(tmp_path)
    for refused in ("x" * 5000, "a\0b", "~nobody-there/x", "file/below"):
        path = tmp_path / refused
        assert not (is_there(path) or is_file(path) or is_folder(path))


def test_all_home_folders_are_found_by_one_function():
    root = Path(trainctl.__file__).parent
    found = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if ".expanduser()" in file.read_text(encoding="utf-8")
    }
    assert found == {"models/local_path.py"}
