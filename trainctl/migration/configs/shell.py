"""Commands of a shell script, read and never run: words with the script's own variables in them.

Variables, arrays, defaults (`${B:-4}`) and sums (`$((2 * N))`) are inserted as far as the script
itself says them. What only a running shell knows stays as it is written, as an `Unresolved`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_TEXT = 1 << 20
"""Maximum number of characters in all words, which variables of variables multiply."""

OPENING, CLOSING = ("if", "for", "while", "until", "case", "{"), ("fi", "done", "esac", "}")
BETWEEN = ("then", "else", "elif", "do", "!", "time", "exec", "nohup")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"([A-Za-z_]\w*)(?:\[[@*]\])?(?:(:?)([-=+])(.*))?", re.DOTALL)

Value = str | list[str]


class Unresolved(str):
    """Word with parts that only a running shell knows, as it is written."""

    line: int

    def __new__(cls, text: str, line: int) -> Unresolved:
        word = super().__new__(cls, text)
        word.line = line
        return word


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command."""

    words: list[str]
    line: int


def read_commands(text: str, variables: dict[str, Value | None], line: int = 1) -> list[Command]:
    """Return the commands of a script in their order.

    Args:
        variables: Values known before; the script's own are added.
        line: Number of the first line.

    Raises:
        ValueError: A quote is not closed, or the words are too many.
    """
    return _Reader(text, variables, line).read()


class _Reader:
    """Reader of one text: its place, the word and the command that are being read."""

    def __init__(self, text: str, variables: dict[str, Value | None], line: int) -> None:
        self._text, self._variables, self._line = text, variables, line
        self._place = self._size = self._depth = 0
        self._commands: list[Command] = []
        self._words: list[str] = []
        self._word: list[str] | None = None
        self._is_open = self._is_conditional = False
        self._first_line = line
        self._array: tuple[str, int] | None = None

    def read(self) -> list[Command]:
        while self._place < len(self._text):
            self._step()
        self._end_command()
        return self._commands

    def _next(self) -> str:
        character = self._text[self._place]
        self._place += 1
        self._line += character == "\n"
        return character

    def _ahead(self, text: str) -> bool:
        return self._text.startswith(text, self._place)

    def _step(self) -> None:
        character = self._next()
        if character == "\\":
            if self._place < len(self._text) and (after := self._next()) != "\n":
                self._add(after)
        elif character == "'":
            self._add(self._until("'"))
        elif character == '"':
            self._quoted()
        elif character in "$`":
            self._insert(character, in_quotes=False)
        elif character == "#" and self._word is None:
            self._place = (self._text + "\n").index("\n", self._place)
        elif character in " \t\r" or (character == "\n" and self._array):
            self._end_word()
        elif character in "\n;&|()":
            self._separate(character)
        elif character in "<>":
            self._redirect(character)
        else:
            self._add(character)

    def _add(self, text: str) -> None:
        if self._word is None:
            self._word, self._is_open = [], False
            self._first_line = self._first_line if self._words else self._line
        self._size += len(text)
        if self._size > MOST_TEXT:
            raise ValueError(f"its words have more than {MOST_TEXT:,} characters")
        self._word.append(text)

    def _until(self, end: str) -> str:
        start, place = self._place, self._text.find(end, self._place)
        if place < 0:
            raise ValueError(f"No closing quotation, line {self._line}")
        self._place = place + len(end)
        self._line += self._text.count("\n", start, self._place)
        return self._text[start:place]

    def _quoted(self) -> None:
        self._add("")
        while self._place < len(self._text):
            character = self._next()
            if character == '"':
                return
            if character == "\\" and self._place < len(self._text):
                after = self._next()
                self._add(after if after in '$`"\\' else "" if after == "\n" else f"\\{after}")
            elif character in "$`":
                self._insert(character, in_quotes=True)
            else:
                self._add(character)
        raise ValueError(f"No closing quotation, line {self._line}")

    def _separate(self, character: str) -> None:
        if self._array and character == ")":
            self._end_array()
            return
        if character == "(" and self._word and _ASSIGNMENT.fullmatch("".join(self._word)):
            self._array = "".join(self._word), len(self._words)
            self._word = None
            return
        self._end_command()
        self._depth += {"(": 1, ")": -1}.get(character, 0)
        self._is_conditional = character in "&|" and self._ahead(character)
        if self._is_conditional:
            self._place += 1

    def _redirect(self, character: str) -> None:
        """Skip a redirection, and the text of a here-document."""
        if self._word and "".join(self._word).isdigit():
            self._word = None
        self._end_word()
        found = re.compile(r"[<>&|]*-?[ \t]*([^\s;|&<>]*)").match(self._text, self._place)
        written = found[0] if found else ""
        self._place += len(written)
        if character == "<" and written[:1] == "<" and written[:2] != "<<":
            end = re.escape(found[1].strip("'\"")) if found else ""
            body = re.compile(rf"(?ms).*?^\t*{end}[ \t]*$").match(self._text, self._place)
            stop = body.end() if body else len(self._text)
            self._line += self._text.count("\n", self._place, stop)
            self._place = stop

    def _end_word(self) -> None:
        if self._word is None:
            return
        text = "".join(self._word)
        self._words.append(Unresolved(text, self._line) if self._is_open else text)
        self._word = None

    def _end_array(self) -> None:
        self._end_word()
        (name, first), self._array = self._array or ("", 0), None
        items, self._words = self._words[first:], self._words[:first]
        found = _ASSIGNMENT.fullmatch(name)
        self._set(found[1] if found else "", items, is_added=bool(found and found[2]))

    def _end_command(self) -> None:
        self._end_word()
        words, self._words, self._array = self._words, [], None
        while words and words[0] in (*OPENING, *CLOSING, *BETWEEN, "export", "readonly", "local"):
            word = words.pop(0)
            self._depth += (word in OPENING) - (word in CLOSING)
            if word == "for" and words:
                self._variables[words[0]] = None
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            value = found[3]
            is_open = isinstance(words[0], Unresolved)
            self._set(
                found[1],
                Unresolved(value, words[0].line) if isinstance(words[0], Unresolved) else value,
                is_added=bool(found[2]) and not is_open,
            )
            words.pop(0)
        if words:
            self._commands.append(Command(words, self._first_line))
        self._is_conditional = False

    def _set(self, name: str, value: Value, *, is_added: bool) -> None:
        """Set a variable; one that is set under a condition is not known."""
        before = self._variables.get(name)
        if is_added and isinstance(before, str) and isinstance(value, str):
            value = before + value
        elif is_added and isinstance(before, list) and isinstance(value, list):
            value = [*before, *value]
        is_sure = self._depth <= 0 and not self._is_conditional
        self._variables[name] = value if is_sure or before == value else None

    def _insert(self, character: str, *, in_quotes: bool) -> None:
        """Insert what stands for a `$` or a backquote."""
        start = self._place - 1
        value = self._expansion(character)
        if value is None:
            self._add(self._text[start : self._place])
            self._is_open = True
            return
        is_whole = isinstance(value, list) or not in_quotes
        parts = value if isinstance(value, list) else value.split() if is_whole else [value]
        if not in_quotes and isinstance(value, str) and value[:1].isspace():
            self._end_word()
        for number, part in enumerate(parts):
            if number:
                self._end_word()
            self._add(part)
            self._is_open = self._is_open or isinstance(part, Unresolved)
        if isinstance(value, Unresolved):
            self._is_open = True

    def _expansion(self, character: str) -> Value | None:
        if character == "`":
            self._until("`")
            return None
        if self._ahead("(("):
            text = self._bracketed("(", ")")
            return _calculated(text[1:-1], self._variables)
        if self._ahead("("):
            self._bracketed("(", ")")
            return None
        if self._ahead("{"):
            return self._parameter(self._bracketed("{", "}"))
        found = _NAME.match(self._text, self._place)
        if found is None:
            if self._place < len(self._text) and self._text[self._place] in "@*#?$!-0123456789":
                self._place += 1
                return None
            return "$"
        self._place = found.end()
        value = self._variables.get(found[0])
        return value[0] if isinstance(value, list) and value else value

    def _bracketed(self, opening: str, closing: str) -> str:
        """Return the text between brackets, which may have others in it."""
        start, depth = self._place + 1, 0
        while self._place < len(self._text):
            character = self._next()
            depth += (character == opening) - (character == closing)
            if not depth:
                return self._text[start : self._place - 1]
        raise ValueError(f"no closing {closing}, line {self._line}")

    def _parameter(self, text: str) -> Value | None:
        found = _PARAMETER.fullmatch(text)
        if found is None:
            return None
        name, colon, action, other = found.groups()
        value = self._variables.get(name)
        is_set = name in self._variables and not (colon and value == "")
        if action is None or (action in "-=" and is_set):
            return value
        if action == "+" and not is_set:
            return ""
        inner = _Reader(f'"{other}"', self._variables, self._line)
        words = [word for command in inner.read() for word in command.words]
        return words[0] if words else ""


_SUMS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_DIGITS = 18


def _calculated(text: str, variables: Mapping[str, Value | None]) -> str | None:
    """Return the value of an arithmetic expression; None if a part of it is not known."""
    try:
        tree = ast.parse(re.sub(r"[${}]", "", text).strip(), mode="eval")
        return str(_number(tree.body, variables))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: Any, variables: Mapping[str, Value | None]) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        found = _SUMS[type(node.op)](_number(node.left, variables), _number(node.right, variables))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = -_number(node.operand, variables)
    elif isinstance(node, ast.Constant):
        found = int(str(node.value))
    elif isinstance(node, ast.Name) and isinstance(value := variables.get(node.id), str):
        found = int(value)
    else:
        raise ValueError(type(node).__name__)
    if abs(found) >= 10**_DIGITS:
        raise ValueError("it is too large")
    return found
