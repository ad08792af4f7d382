"""Parser of JSON files that keeps the line of each key and reports all problems at once.

DeepSpeed reads Hjson, which allows comments, trailing commas and unquoted names. Other programs
read JSON. This parser accepts and reports comments and trailing commas, and refuses the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.errors import ExitCode, Finding, Severity, TrainctlError

NO_JSON, GIVEN_TWICE, ONLY_HJSON = "TC200", "TC201", "TC202"

KeyPath = tuple[str, ...]
DEEPEST = 64
"""Maximum nesting; no configuration is deeper."""

SPACE = re.compile(r"[ \t\r\n]+")
COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"')
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?(?![\w.])")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
CONSTANTS = {"true": True, "false": False, "null": None}
LONGEST_NUMBER = 400
"""Maximum characters of a number; no number of a configuration is longer."""


@dataclass(frozen=True, slots=True)
class JsonDocument:
    """A JSON object, as far as it could be read."""

    value: Mapping[str, Any] = field(default_factory=dict)
    """The object; for a key given twice, the last value."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Line of each key, by its path."""
    findings: tuple[Finding, ...] = ()
    """Problems of the text itself; they include an error if no object could be read."""

    @property
    def is_readable(self) -> bool:
        return not any(finding.rule == NO_JSON for finding in self.findings)

    def line_of(self, key: str) -> int | None:
        """Return the line of a dotted key, or of its innermost section that the file has."""
        path = tuple(key.split("."))
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def read_json(path: Path) -> JsonDocument:
    """Read a file that holds a JSON object.

    Raises:
        TrainctlError: The file cannot be read at all.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TrainctlError(
            f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.bad_input
        ) from None
    except UnicodeDecodeError:
        raise TrainctlError(f"{path} is not text in UTF-8") from None
    return parse_json(text, shown=str(path))


def parse_json(text: str, *, shown: str) -> JsonDocument:
    """Parse a JSON object; problems become findings that name the line.

    Args:
        shown: Name of the file in messages.
    """
    parser = _Parser(text, shown)
    try:
        value = parser.document()
    except _Unreadable:
        value = {}
    return JsonDocument(value, parser.lines, tuple(parser.findings))


class _Unreadable(Exception):
    """End of parsing: the rest of the text is not JSON. The last finding says why."""


class _Parser:
    def __init__(self, text: str, shown: str) -> None:
        self.text, self.shown = text, shown
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.findings: list[Finding] = []

    def document(self) -> Mapping[str, Any]:
        self.skip()
        if not self.text[self.at :]:
            raise self.failed("the file is empty", "a JSON object, such as {}")
        start = self.at
        value = self.value((), 0)
        self.skip()
        if self.at < len(self.text):
            raise self.failed(f"nothing may follow the document, and {self.here()} does")
        if not isinstance(value, dict):
            self.at = start
            raise self.failed(f"a configuration is an object in braces, not {self.here()}")
        return value

    def value(self, path: KeyPath, depth: int) -> Any:
        if depth > DEEPEST:
            raise self.failed(f"more than {DEEPEST} levels")
        character = self.text[self.at : self.at + 1]
        if character == "{":
            return self.object(path, depth)
        if character == "[":
            return self.list(path, depth)
        if character == '"':
            return self.string()
        return self.scalar()

    def object(self, path: KeyPath, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.at += 1
        self.skip()
        while not self.takes("}"):
            if self.text[self.at : self.at + 1] != '"':
                word = WORD.match(self.text, self.at)
                hint = f'"{word[0]}"' if word else ""
                raise self.failed(f"expected a key in double quotes, found {self.here()}", hint)
            line, name = self.line(), self.string()
            inner = (*path, name)
            if name in found:
                self.given_twice(inner, line)
            self.lines[inner] = line
            self.skip()
            if not self.takes(":"):
                raise self.failed(f'expected a colon after "{name}", found {self.here()}')
            self.skip()
            found[name] = self.value(inner, depth + 1)
            self.separator("}")
        return found

    def list(self, path: KeyPath, depth: int) -> list[Any]:
        found: list[Any] = []
        self.at += 1
        self.skip()
        while not self.takes("]"):
            found.append(self.value((*path, str(len(found))), depth + 1))
            self.separator("]")
        return found

    def separator(self, closing: str) -> None:
        """Consume a comma, or require the closing bracket next."""
        self.skip()
        comma = self.at
        if self.takes(","):
            self.skip()
            if self.text[self.at : self.at + 1] == closing:
                end, self.at = self.at, comma
                self.note("a comma before the closing bracket", "remove the comma")
                self.at = end
        elif self.text[self.at : self.at + 1] != closing:
            raise self.failed(f"expected a comma or {closing}, found {self.here()}")

    def string(self) -> str:
        match = STRING.match(self.text, self.at)
        if match is None:
            raise self.failed("a text that does not end on its line, or has an illegal escape")
        self.at = match.end()
        # Half of a surrogate pair, which Python would take, is no character.
        text: str = json.loads(match[0])
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def scalar(self) -> Any:
        match = NUMBER.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
            return self.number(match)
        word = WORD.match(self.text, self.at)
        if word is not None and word[0] in CONSTANTS:
            self.at = word.end()
            return CONSTANTS[word[0]]
        if word is not None and word[0].lower() in CONSTANTS:
            raise self.failed(f"{word[0]} is not JSON", word[0].lower())
        if word is not None and word[0] in ("NaN", "Infinity", "inf", "nan"):
            raise self.failed(f"{word[0]} is no number of JSON", "a finite number")
        raise self.failed(f"expected a value, found {self.here()}", f'"{word[0]}"' if word else "")

    def number(self, match: re.Match[str]) -> int | float:
        if len(match[0]) > LONGEST_NUMBER:
            raise self.failed("a number that is too long")
        if match[1] is None and match[2] is None:
            return int(match[0])
        number = float(match[0])
        if number in (float("inf"), float("-inf")):
            raise self.failed(f"{match[0]} is too large a number")
        return int(number) if number.is_integer() and abs(number) < 2**63 else number

    def skip(self) -> None:
        """Skip white space, and comments, which are reported."""
        while True:
            space = SPACE.match(self.text, self.at)
            if space:
                self.at = space.end()
            comment = COMMENT.match(self.text, self.at)
            if comment is None:
                return
            self.note("a comment", "move it into a file beside the JSON")
            self.at = comment.end()

    def takes(self, character: str) -> bool:
        if self.text[self.at : self.at + 1] != character:
            return False
        self.at += 1
        return True

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def here(self) -> str:
        found = self.text[self.at : self.at + 1]
        return "the end of the file" if not found else repr(found)

    def given_twice(self, path: KeyPath, line: int) -> None:
        key = ".".join(path)
        self.findings.append(
            Finding(
                rule=GIVEN_TWICE,
                key=key,
                message=f"{key} is given twice, first in line {self.lines[path]}",
                hint="keep one of them",
                source=f"{self.shown}:{line}",
            )
        )

    def note(self, what: str, hint: str) -> None:
        """Report an Hjson construct, once for each kind."""
        if any(
            found.rule == ONLY_HJSON and found.message.startswith(what) for found in self.findings
        ):
            return
        self.findings.append(
            Finding(
                rule=ONLY_HJSON,
                message=f"{what} is not JSON: DeepSpeed takes it, transformers does not",
                hint=hint,
                severity=Severity.warning,
                source=f"{self.shown}:{self.line()}",
            )
        )

    def failed(self, message: str, hint: str = "") -> _Unreadable:
        """Report the problem that ends parsing, and return the exception to raise."""
        start = self.text.rfind("\n", 0, self.at) + 1
        self.findings.append(
            Finding(
                rule=NO_JSON,
                message=f"not JSON: {message}",
                hint=hint,
                source=f"{self.shown}:{self.line()}:{self.at - start + 1}",
            )
        )
        return _Unreadable()
