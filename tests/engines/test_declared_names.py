"""Nothing is changed in other packages, or used of their inside, that no table declares.

By the text of every file of the package: private names, methods of other packages' classes that a
subclass of ours takes the place of, attributes that are set on what is not ours, and `__class__`.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainctl.engines.patch_checks import TABLES

ROOT = Path(__file__).parents[2] / "trainctl"
PACKAGES = {"torch", "deepspeed", "transformers", "torchao"}
ROOMS = ("data", "engines", "launchers/agent", "migration", "models", "train")
"""No other folder imports them (`tests/test_imports.py`)."""
PATHS = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

PUBLIC = {
    # torch documents that these may be set.
    "benchmark",
    "data",
    "grad",
    "fill_uninitialized_memory",
    "in_features",
    "num_embeddings",
    "on_trace_ready",
    "out_features",
    "padding_idx",
    "weight",
    # torch documents it (Autograd mechanics): the count of changes in place.
    "_version",
    # torch documents these, private or not (Understanding CUDA Memory Usage).
    "_dump_snapshot",
    "_record_memory_history",
    # torch documents these (Flight Recorder for Debugging Stuck Jobs).
    "_C",
    "_distributed_c10d",
    "_dump_fr_trace_json",
    "_dump_nccl_trace_json",
    # transformers documents these, of its configurations and of Conv1D.
    "architectures",
    "eos_token_id",
    "id2label",
    "label2id",
    "pad_token_id",
    "layer_types",
    "nf",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_groups",
    "num_key_value_heads",
    "nx",
    "use_cache",
    # tokenizers documents it.
    "encode_special_tokens",
    # gguf and xllamacpp (llama.cpp's parameters of a server) have no others than these.
    "cache_type_k",
    "cache_type_v",
    "fit_params",
    "flash_attn_type",
    "n_ctx",
    "n_gpu_layers",
    "n_parallel",
    "special_token_ids",
    "verbosity",
    "warmup",
    # Python's.
    "__code__",
    "__doc__",
    "__func__",
    "__version__",
    "annotation",
    "_current_frames",
    "_exit",
}
_LATER = (ast.FunctionDef, ast.ClassDef)
"""Nodes whose bodies an import does not run, or runs in a namespace of their own."""
OF_EVERYTHING = {*dir(object), *dir(type), *dir(type(ast)), *dir(BaseException), "__enter__"} | {
    "__exit__",
    "__file__",
    "__path__",
}

DECLARED = {
    name
    for table in TABLES
    for use in table.uses
    for name in (use.target.rpartition(":")[2].rpartition(".")[2], *use.names)
}


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    """Return the parsed files, by path."""
    return {path: ast.parse(path.read_text()) for path in PATHS}


@functools.cache
def _ours() -> set[str]:
    """Every name that some file of the package gives to something of its own."""
    names: set[str] = set()
    for node in (node for tree in _trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            names.add(node.attr)
    return names


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_private(name: str) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return name not in OF_EVERYTHING
    return name.startswith("_") and name not in _ours()


def _imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names that a file has from one of the packages, each with the module and the name there."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (alias.name, "")
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = (node.module, alias.name)
    return {name: at for name, at in found.items() if at[0].partition(".")[0] in PACKAGES}


def _is_set_on_others(node: ast.Attribute, imported: dict[str, tuple[str, str]]) -> bool:
    if isinstance(node.ctx, ast.Load) or _is_own(node):
        return False
    root = ast.unparse(node.value).partition(".")[0]
    return node.attr == "__class__" or root in imported or node.attr not in _ours()


@functools.cache
def _declarable(path: Path) -> list[tuple[int, str]]:
    """Return lines and names of everything in a file that has to be declared."""
    return sorted(_inside(_trees()[path]))


def _inside(tree: ast.Module) -> Iterator[tuple[int, str]]:
    imported = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if _is_set_on_others(node, imported) or _is_private(node.attr):
                yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(name.value):
                yield node.lineno, name.value
        elif isinstance(node, ast.ClassDef):
            for base in (ast.unparse(base) for base in node.bases):
                for method in (item for item in node.body if isinstance(item, ast.FunctionDef)):
                    is_private = method.name.startswith("_") and method.name not in OF_EVERYTHING
                    if is_private and hasattr(_object(base, imported), method.name):
                        yield method.lineno, method.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for part in (*node.module.split("."), *(alias.name for alias in node.names)):
                if node.module.partition(".")[0] in PACKAGES and _is_private(part):
                    yield node.lineno, part


def _object(name: str, imported: dict[str, tuple[str, str]]) -> Any:
    """Return the object of a dotted name; None if it comes from none of the packages."""
    root, _, rest = name.partition(".")
    if root not in imported:
        return None
    module, attribute = imported[root]
    found: Any = importlib.import_module(module if attribute else module.partition(".")[0])
    for part in filter(None, (attribute, *rest.split("."))):
        found = getattr(found, part)
    return found


def test_every_use_is_declared() -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in PATHS
        for line, name in _declarable(path)
        if name not in DECLARED | PUBLIC
    ]
    assert not missing, "neither ours nor in a table of trainctl/engines"


def test_every_declaration_is_used() -> None:
    used = {name for path in PATHS for _, name in _declarable(path)}
    text = "\n".join(path.read_text() for path in PATHS if not path.name.endswith("patches.py"))
    for table in TABLES:
        for use in table.uses:
            for name in use.names or (use.target.rpartition(":")[2].rpartition(".")[2],):
                assert name in used or name in text, f"{use.target}: nothing uses {name}"


def test_nothing_is_changed_because_a_module_is_imported() -> None:
    for path in PATHS:
        outside = [node for node in _trees()[path].body if not isinstance(node, _LATER)]
        for node in (inner for statement in outside for inner in ast.walk(statement)):
            is_set = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
            assert not is_set or node.attr in PUBLIC, f"{path}:{node.lineno}"
