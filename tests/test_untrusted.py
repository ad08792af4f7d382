"""Names from stores, checkpoints and foreign files become paths by one function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from trainctl.untrusted import count, is_count, is_finite, is_time, safe_name, safe_path

PACKAGE = Path(__file__).parents[1] / "trainctl"

READERS = (
    "migration/checkpoints",
    "mirror",
    "models/tensors.py",
    "runs/checkpoints.py",
    "runs/manifest.py",
    "runs/mirror_state.py",
)
"""Code that reads names from what others wrote: stores, checkpoints, indexes of weights."""

OWN = {
    "migration/checkpoints/deepspeed.py": {
        # names that `iterdir` returned, or that were made of them
        "folder / experts[0]",
        "folder / name",
        "listed[0].path.with_name(name)",
        "directory / read_pointer(pointer)",
    },
    "migration/checkpoints/megatron.py": {
        "directory / (f'iter_{int(name):07d}' if name.isdigit() else name)"
    },
    "migration/checkpoints/to_universal.py": {
        "directory / read_pointer(pointer)",
        "folder / 'zero' / parameter",  # for a message
        "folder / 'zero' / parameter / f'{state}.pt'",
        "folder / tag",  # `global_step` and a number
        "folder / tag / f'{prefix}mp_rank_00_model_states.pt'",
        "parent / f'{WEIGHTS}.pt'",
        "target / f'{file}.pt'",
    },
    "migration/checkpoints/trainer.py": {
        "folder / OPTIMIZERS[0]",
        "folder / file.name",
        "path / name",  # constants, or `safe_name`
    },
    "migration/checkpoints/write.py": {"folder / file"},  # `imported-` and a number
    "mirror/fetch.py": {
        "root.with_name(root.name + FETCHING)",
        "run.checkpoints / each.name",  # a key; files below it are made by `safe_path`
    },
    "mirror/uploader.py": {
        "folder / name",  # never opened
        "info.path / name",  # of a manifest, whose names are checked
        "self._run.checkpoints / each.name",  # `is_name_of` holds
    },
    "models/tensors.py": {"folder / file", "folder / name"},  # `weight_map` checks
    "runs/checkpoints.py": {
        "path.with_name(f'{path.name}.before-attempt-{attempt}')",
        "path.with_name(f'{path.name}.damaged-{time.time_ns()}')",
        "run.checkpoints / checkpoint_name(step, weights_only=weights_only)",
        "run.checkpoints / pointer",
    },
    "runs/manifest.py": {"path / entry['name']"},  # `_is_file_name` holds
}
"""Paths that are made of other names than constants, as they stand in the code."""


def _is_constant(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return isinstance(node, ast.Constant) or name.isupper()


def _paths_in(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            names, shown = [node.right], ast.unparse(node)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            names, shown = [node.value], f"{ast.unparse(node.target)} / ({ast.unparse(node.value)})"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
            "joinpath",
            "with_name",
        ):
            names, shown = node.args, ast.unparse(node)
        else:
            continue
        if not all(map(_is_constant, names)) and not _is_arithmetic(node):
            found.add(shown)
    return found


def _is_arithmetic(node: ast.AST) -> bool:
    return ast.unparse(node) in ("size / self._rate",)


def test_foreign_names_become_paths_by_one_function():
    found = {}
    for place in READERS:
        files = (
            [PACKAGE / place] if place.endswith(".py") else sorted((PACKAGE / place).glob("*.py"))
        )
        for file in files:
            if paths := _paths_in(file):
                found[str(file.relative_to(PACKAGE))] = paths
    assert found == OWN, "use safe_path, or say here why the name is safe"


@pytest.mark.parametrize("name", ["a", ".ssh", "step-00000010", "ü b", "x" * 255])
def test_components_are_taken_as_they_are(name):
    assert safe_name(name) == name
    assert safe_path(Path("/run"), f"{name}/{name}") == Path("/run", name, name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "/a", "a/", "a//b", "a/../b", "a\0", "a\n", "\udcff", "ä" * 128, 7, None],
)
def test_what_leads_elsewhere_is_refused(name):
    with pytest.raises(ValueError, match=r"is no name|is no path"):
        safe_path(Path("/run"), name)
    if not isinstance(name, str) or "/" not in name:
        with pytest.raises(ValueError, match="is no name"):
            safe_name(name)


def test_numbers_of_files_are_plausible():
    assert is_count(0) and is_count(2**63 - 1) and is_finite(-1.5) and is_time(1.7e9)
    for value in (-1, 2**63, True, 1.0, "1", None):
        assert not is_count(value)
        with pytest.raises(ValueError, match="bytes is"):
            count(value, "bytes")
    for value in (float("nan"), float("inf"), 10**400, True, "1"):
        assert not is_finite(value)
    assert not is_time(1e300) and not is_time(-1)
    with pytest.raises(ValueError, match="20 digits"):
        count(10**5000, "bytes")
