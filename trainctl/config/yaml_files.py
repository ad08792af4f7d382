"""Reader of options' and recipes' YAML files that keeps the line of each key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainctl.config.check import Setting
from trainctl.config.reading import read_bytes
from trainctl.config.suggest import first_line, missing_colon
from trainctl.errors import Finding

UNREADABLE = "TC105"
SCHEMA_COMMENT = "# yaml-language-server: $schema="
"""Beginning of a comment that names an editor's JSON Schema; it is no part of a description."""
MOST_BYTES = 4 << 20
MOST_NODES = 20_000
"""Maximum nodes of an option or a recipe; the largest shipped file has some hundreds."""
MOST_SETTINGS = 1000
"""Maximum keys that a file sets; the schema has some hundreds."""
MOST_DEPTH = 500
_SCALAR_LENGTH = 64
"""Maximum characters of a number or switch; longer scalars are text."""
EXPONENT = re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.[\d_]+)[eE][-+]?\d+$")


@dataclass(frozen=True, slots=True)
class Default:
    """A line of a defaults list: a file to extend, or an option of a group."""

    group: str
    """Group as written; empty for a file to extend."""
    option: Any
    """Name of the option, or of the file."""
    source: str
    written: Any
    """The whole line, with Hydra's keywords."""

    @property
    def is_override(self) -> bool:
        """Whether the line changes the option of a group that another file has chosen."""
        return bool(self.group) and "override" in str(next(iter(self.written))).split()


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A YAML file: its settings, its defaults list, and its problems."""

    settings: tuple[Setting, ...] = ()
    defaults: tuple[Default, ...] = ()
    findings: tuple[Finding, ...] = ()


def leading_comment(path: Path) -> list[str]:
    """Return the lines of a file's leading comment; empty if it has none or cannot be read."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError):
        return []
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        if line.startswith(SCHEMA_COMMENT):
            continue
        comment.append(line.lstrip("#").strip())
    return comment


def read_text(path: Path) -> str:
    """Return the text of an option or a recipe; cached until the file changes.

    Raises:
        OSError: It cannot be read.
        ValueError: It is too large, or no UTF-8.
    """
    about = path.stat()
    return _read_bounded_text(path, about.st_ino, about.st_size, about.st_mtime_ns)


@cache
def _read_bounded_text(path: Path, *is_the_same: int) -> str:
    return read_bytes(path, most_bytes=MOST_BYTES).decode()


def read_document(path: Path, shown: str) -> YamlDocument:
    """Read an option or a recipe; problems become findings that name the line.

    Args:
        shown: Name of the file in messages.
    """
    try:
        return _parse_document(read_text(path), shown)
    except OSError as error:
        return _unreadable_finding(shown, f"cannot be read: {error.strerror}")
    except UnicodeError:
        return _unreadable_finding(shown, "is not UTF-8 text")
    except ValueError as error:
        return _unreadable_finding(shown, f"is not a usable mapping: {first_line(error)}")


@cache
def _parse_document(text: str, shown: str) -> YamlDocument:
    try:
        node = compose_bounded(text)
        loader = _loader_class()("")
        try:
            return _read_mapping(loader, node, shown)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        lines = text.splitlines()
        line = _line_of_error(error, lines)
        written = "".join(lines[line - 1 : line]) if line else ""
        slip = missing_colon(written)
        if slip is not None:
            return _unreadable_finding(shown, f"is not valid YAML: {slip[0]}", line, slip[1])
        hint = _yaml_hint(str(error.problem), written)
        return _unreadable_finding(shown, f"is not valid YAML: {error.problem}", line, hint)
    except yaml.YAMLError as error:
        return _unreadable_finding(shown, f"is not valid YAML: {first_line(error)}")
    except (RecursionError, ValueError) as error:
        return _unreadable_finding(shown, f"is not a usable mapping: {first_line(error)}")


def _line_of_error(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> int | None:
    """Return the line of a mistake, which the parser often notices further below."""
    if error.problem_mark is None:
        return None
    stopped = line = int(error.problem_mark.line) + 1
    opened = str(error.context).endswith(("flow sequence", "flow mapping", "quoted scalar"))
    if opened and error.context_mark is not None:
        return int(error.context_mark.line) + 1
    for above in range(min(stopped, len(lines)), 0, -1):
        written = lines[above - 1].partition("#")[0].strip()
        if missing_colon(written):
            line = above
        elif written and above != stopped:
            break
    return line


_CAUSES = (
    (
        ("mapping values are not allowed",),
        'a value with ": " in it stands in quotes, and each key in a line of its own',
    ),
    (("',' or",), "close the bracket that is opened in this line"),
    (("cannot start any token",), "put a value that begins with @, ` or % in quotes"),
    (
        ("expected key", "block end"),
        "give the keys of one section the same number of spaces in front",
    ),
    (("alias", "anchor"), "put a value that begins with * or & in quotes"),
    (
        ("quoted scalar", "unexpected end"),
        "close the quotes that are opened in this line",
    ),
    (("another document",), "leave out the line of ---: a file holds one document"),
    (("",), "look at this line and the one above it: colons, quotes, brackets, indentation"),
)
"""Usual causes of a parser's problems, by words of its message; the first match counts."""


def _yaml_hint(problem: str, written: str) -> str:
    """Return the usual cause of a parser's problem, judged by the line where it gave up."""
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return "indent with spaces: YAML takes no tabs"
    return next(hint for words, hint in _CAUSES if any(word in problem for word in words))


def compose_bounded(text: str) -> yaml.Node | None:
    """Return the node tree of a YAML text, within bounds.

    A few lines of aliases (`*name`) can expand to billions of values, and a value nested ten
    thousand levels deep crashes libyaml's binding.

    Raises:
        yaml.YAMLError: It is no YAML.
        ValueError: It is nested too deeply, has more than `MOST_NODES` values with all aliases
            expanded, or contains itself.
    """
    loader = _loader_class()
    if len(text) > MOST_DEPTH:  # each level takes at least one character
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise ValueError("it is nested too deeply")
    node: yaml.Node | None = yaml.compose(text, Loader=loader)
    sizes: dict[int, int] = {}

    def size(inner: yaml.Node) -> int:
        known = sizes.get(id(inner))
        if known is None:
            sizes[id(inner)] = MOST_NODES + 1  # stays if it contains itself
            parts = inner.value if isinstance(inner, yaml.CollectionNode) else ()
            known = 1 + sum(
                size(each) for part in parts for each in (part if type(part) is tuple else (part,))
            )
            sizes[id(inner)] = known
        return known

    if node is not None and size(node) > MOST_NODES:
        raise ValueError(f"it holds more than {MOST_NODES:,} values, its aliases written out")
    return node


def read_scalar(text: str) -> Any:
    """Return the number or switch that a text stands for in YAML, else the text itself."""
    if len(text) > _SCALAR_LENGTH:
        return text
    try:
        value = yaml.load(text, Loader=_loader_class())
    except (yaml.YAMLError, ValueError):
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _unreadable_finding(
    shown: str, what: str, line: int | None = None, hint: str = ""
) -> YamlDocument:
    source = f"{shown}:{line}" if line else shown
    finding = Finding(rule=UNREADABLE, message=f"{shown} {what}", hint=hint, source=source)
    return YamlDocument(findings=(finding,))


def _read_mapping(loader: Any, node: yaml.Node | None, shown: str) -> YamlDocument:
    if node is None:
        return YamlDocument()
    if not isinstance(node, yaml.MappingNode):
        slip = missing_colon(str(node.value)) or ("", "")
        what = "must hold `key: value` lines"
        return _unreadable_finding(shown, what, _line_number(node), slip[1])
    settings: list[Setting] = []
    defaults: list[Default] = []
    findings: list[Finding] = []
    _check_twice(node, shown, findings)
    loader.flatten_mapping(node)
    for name, value in node.value:
        if name.value == "defaults":
            _read_defaults(loader, value, shown, defaults, findings)
        else:
            _read_settings(loader, name, value, shown, (), settings, findings)
    return YamlDocument(tuple(settings), tuple(defaults), tuple(findings))


def _read_settings(
    loader: Any,
    name: yaml.Node,
    node: yaml.Node,
    shown: str,
    prefix: tuple[str, ...],
    settings: list[Setting],
    findings: list[Finding],
) -> None:
    """Append a setting for each leaf below a mapping, named by its key's line."""
    if len(prefix) > 20:
        raise ValueError("it is nested too deeply")
    path = (*prefix, str(name.value))
    source = f"{shown}:{_line_number(name)}"
    if isinstance(node, yaml.MappingNode) and node.value:
        _check_twice(node, shown, findings)
        loader.flatten_mapping(node)
        for inner_name, inner in node.value:
            _read_settings(loader, inner_name, inner, shown, path, settings, findings)
        return
    if len(settings) == MOST_SETTINGS:
        raise ValueError(f"it sets more than {MOST_SETTINGS:,} keys")
    value = loader.construct_object(node, deep=True)
    text = node.value if isinstance(node, yaml.ScalarNode) else None
    settings.append(Setting(path, value, source, text, f"{shown}:{_line_number(node)}"))


def _read_defaults(
    loader: Any, node: yaml.Node, shown: str, defaults: list[Default], findings: list[Finding]
) -> None:
    if not isinstance(node, yaml.SequenceNode):
        finding = Finding(
            rule=UNREADABLE,
            key="defaults",
            message="defaults is no list",
            hint="write `defaults: [base, _self_]`, or name a recipe instead of base",
            source=f"{shown}:{_line_number(node)}",
        )
        findings.append(finding)
        return
    for item in node.value:
        value = loader.construct_object(item, deep=True)
        source = f"{shown}:{_line_number(item)}"
        if isinstance(value, str):
            defaults.append(Default("", value, source, value))
        elif isinstance(value, dict) and len(value) == 1:
            ((key, option),) = value.items()
            group = str(key).split()[-1] if str(key).split() else ""
            defaults.append(Default(group, option, source, value))
        else:
            findings.append(
                Finding(
                    rule=UNREADABLE,
                    key="defaults",
                    message=f"{value!r} is no line of a defaults list",
                    hint="write a recipe's name, `group: option` or `override /group: option`",
                    source=source,
                )
            )


def _check_twice(node: yaml.MappingNode, shown: str, findings: list[Finding]) -> None:
    lines: dict[str, int] = {}
    for name, _ in node.value:
        key = str(name.value)
        if key in lines and key != "<<":
            findings.append(
                Finding(
                    rule=UNREADABLE,
                    key=key,
                    message=f"{key} is set twice, in lines {lines[key]} and {_line_number(name)}",
                    hint="keep one of the two",
                    source=f"{shown}:{_line_number(name)}",
                )
            )
        lines[key] = _line_number(name)


def _line_number(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


@cache
def _loader_class() -> Any:
    """Return PyYAML's safe loader, in C if built, that reads `1e-4` as a number like Hydra does."""
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("NumberLoader", (base,), {})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789."))
    # Dates stay text: no key is a date.
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in loader.yaml_implicit_resolvers.items()
    }
    return loader
