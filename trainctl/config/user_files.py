"""Files of the user's code that the ranks will run, found without running them."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trainctl.config.registry import kind_of, unit_groups, user_option_file
from trainctl.config.schema import RunConfig
from trainctl.config.user_code import find_module, functions, parse

_INSTALLED = {"site-packages", "dist-packages"}
_TRAINCTL = Path(__file__).parents[1]


def user_code_files(config: RunConfig, folder: Path) -> list[Path]:
    """Return the files of the user's code that the ranks run, sorted.

    They are the script, the modules of functions, options of the user's folder, and the modules
    that these import. Installed packages and trainctl are left out. What only running the code
    would tell is not found: modules imported by computed names, and files that the code reads.

    Args:
        config: Configuration with an absolute `script`.
        folder: Working directory of the ranks.
    """
    found: dict[Path, None] = {}
    pending: list[tuple[Path, str, Path]] = []  # file, module name, import root
    if config.script is not None:
        script = Path(config.script)
        pending.append((script, "", script.parent))
    chosen = [(group, kind_of(getattr(config, group))) for group in unit_groups()]
    for group, name in [*chosen, *(("callbacks", name) for name in config.callbacks)]:
        option = user_option_file(group, name)
        pending += [(option, "", option.parent)] if option is not None else []
    for _, reference in functions(config):
        pending += _modules(reference.partition(":")[0], folder)
    while pending:
        file, module, where = pending.pop()
        if file in found or _is_installed(file) or not file.is_file():
            continue
        found[file] = None
        if file.suffix == ".py":
            for name in _imported(file, module):
                pending += _modules(name, where)
    return sorted(found)


def _modules(name: str, where: Path) -> Iterator[tuple[Path, str, Path]]:
    """Yield the files of a module and of the packages that contain it, as far as they exist."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        file = find_module(module, where)
        if isinstance(file, str):
            return
        if file is not None:
            yield file.absolute(), module, where
            if _is_installed(file):
                return


def _imported(file: Path, module: str) -> Iterator[str]:
    """Yield the names of modules that a file imports anywhere, and possibly of objects in them."""
    tree = parse(file)
    if tree is None:
        return
    package = module.split(".") if module else []
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_installed(file: Path) -> bool:
    homes = (sysconfig.get_path("stdlib"), _TRAINCTL)
    return bool(_INSTALLED & set(file.parts)) or any(file.is_relative_to(home) for home in homes)
