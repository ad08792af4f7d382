"""Definitions of other packages, read from their installed files: nothing is imported.

So the command line, which imports no torch, can compare them, and a rank can before it imports
torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.Assign | ast.AnnAssign


def package_folder(package: str) -> Path | None:
    """Return the folder from which a top-level package would be imported; None if it is not
    installed.
    """
    spec = importlib.util.find_spec(package)
    found = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(found[0]) if found else None


def find_definition(target: str) -> Definition | None:
    """Return the last definition of a name in the source of its module; None if there is none.

    Args:
        target: Module and name, such as ``package.module:Class.method``.
    """
    module, _, path = target.partition(":")
    text, indent = _module_text(module), ""
    *owners, name = path.split(".")
    for owner in owners:
        text = _class_source(text, indent, owner)
        indent += "    "
    kinds = rf"(?:async )?def {name}\b|class {name}\b|{name}[ ]*(?::|=(?!=))"
    starts = [match.start() for match in re.finditer(rf"^{indent}(?:{kinds})", text, re.MULTILINE)]
    return _first_statement(text[starts[-1] :].splitlines(), indent) if starts else None


def definition_signature(found: Definition) -> str:
    """Return the parameters of a function with their defaults, without types: what a caller
    depends on.
    """
    assert isinstance(found, Function)
    arguments = found.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            rest.annotation = None
    return f"({ast.unparse(arguments)})"


def definition_digest(found: Definition) -> str:
    """Return a digest of the code of a definition, without comments, docstrings, layout and types.

    It is the same on every version of Python, unlike the output of `ast.dump`.
    """
    return hashlib.sha256(_normalized_text(found).encode()).hexdigest()[:12]


def definition_text(found: Definition) -> str:
    """Return the definition as `ast.unparse` writes it, for a search for a statement."""
    return ast.unparse(found)


@cache
def _module_text(module: str) -> str:
    package, *path = module.split(".")
    folder = package_folder(package)
    if folder is not None:
        place = folder.joinpath(*path)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file.read_text(encoding="utf-8")
    return ""


def _class_source(text: str, indent: str, owner: str) -> str:
    """Return the source of a class, up to the next definition beside it; empty if there is none."""
    ends = rf"\n{indent}(?=(?:class|def|async def|if) |@)"
    found = re.search(rf"^{indent}class {owner}\b", text, re.MULTILINE)
    return re.split(ends, text[found.start() :], maxsplit=1)[0] if found else ""


def _first_statement(lines: list[str], indent: str) -> Definition | None:
    """Return the statement that starts at the first line and ends where indentation returns to it.

    It is parsed alone: parsing a module of thousands of lines takes a hundred times as long.
    """
    cut: list[str] = []
    for line in (*lines, f"{indent}end"):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if cut and not line[len(indent) :][:1].isspace():
            try:
                (found,) = ast.parse("\n".join(cut)).body
            except SyntaxError:  # the line is within brackets or a string
                pass
            else:
                return found if isinstance(found, Definition) else None
        cut.append(line[len(indent) :])
    return None


def _normalized_text(node: object) -> str:
    """Return a syntax tree as text, without positions, types, docstrings and empty fields."""
    if isinstance(node, list):
        return f"[{','.join(_normalized_text(each) for each in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    for name in ("annotation", "returns", "type_comment", "type_params", "ctx", "kind"):
        fields.pop(name, None)
    if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    shown = (
        f"{name}={_normalized_text(value)}"
        for name, value in fields.items()
        if value not in (None, [])
    )
    return f"{type(node).__name__}({','.join(shown)})"
