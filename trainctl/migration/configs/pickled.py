"""`training_args.bin`, which transformers' Trainer pickles by `torch.save`, as plain values.

A pickle names classes and functions, and calls them. Nothing is imported or called here: an object
becomes the mapping of its attributes, an enum its value, a type or device of torch its name. What
has no place in such a file, such as a name of Python's own library, is refused.

A `Record` takes the place of an object in checkpoints too.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

from trainctl.config.secrets import REDACTED, is_secret_name
from trainctl.config.yaml_files import EXPONENT, MOST_BYTES
from trainctl.errors import TrainctlError


class Record:
    """Object of a class that is not imported: the arguments and the state that were saved.

    Attributes:
        args: Arguments that the class was called with.
        fields: Attributes that were set afterwards.
    """

    kind = ""
    """Dotted name of the class."""
    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> Record:
        """Make the object without running code of the class."""
        made = super().__new__(cls)
        made.args, made.fields = args, {}
        return made

    def __init__(self, *args: Any) -> None:
        """Take the arguments, which `__new__` has kept."""

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:  # a class with slots saves (attributes, slots)
            if isinstance(part, dict):
                self.fields |= {str(name): value for name, value in part.items()}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.fields[str(key)] = value  # a subclass of dict

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the object."""
        return self.fields.get(name, default)

    def __repr__(self) -> str:
        return f"<{self.kind}>"


MOST_VALUES = 100_000
"""Maximum number of values. Configurations have some hundred; one that refers to its own lists
again and again has more than fit into memory.
"""
MOST_LEVELS = 50
LARGEST = 2**53
"""Largest number of any key; from it on, a float does not count."""


class PlainValues:
    """Conversion of a document's values to plain ones, which counts them."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def value(self, value: Any, name: str = "", level: int = 0) -> Any:
        """Return a value without objects; a text such as `2e-5`, which YAML 1.1 makes, is a number.

        Args:
            name: Key of the value, for errors.

        Raises:
            ValueError: It is no finite number or text, or there are too many, too deep.
        """
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        if level > MOST_LEVELS:
            raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
        if isinstance(value, str):
            return self._text(value, name)
        if isinstance(value, dict):
            return {
                self._text(str(key), name): self.item(str(key), each, name, level + 1)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(each, name, level + 1) for each in value]
        if isinstance(value, bool | int | float):
            return finite(value, name)
        return value.isoformat() if isinstance(value, date) else self.other(value, name, level)

    def item(self, key: str, value: Any, name: str, level: int) -> Any:
        """Return the value of a key."""
        return self.value(value, f"{name}.{key}" if name else key, level)

    def other(self, value: Any, name: str, level: int) -> Any:
        """Return what is neither a text, a number nor a collection."""
        if value is None:
            return None
        raise ValueError(f"{name[:80]} is {type(value).__name__}, which no configuration has")

    def _text(self, value: str, name: str) -> Any:
        if not value.isprintable() and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"{name[:80]!a} holds what is no text")
        return finite(float(value), name) if EXPONENT.match(value) else value


def finite(value: Any, name: str) -> Any:
    """Return a number or a switch.

    Raises:
        ValueError: It is not finite, or beyond `LARGEST`.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name[:80]} is {value}, which is no finite number")
    if abs(value) > LARGEST:
        raise ValueError(f"{name[:80]} is beyond {LARGEST:,}")
    return value


PLAIN = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("collections", "OrderedDict"),
    ("datetime", "timedelta"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
}
"""Classes of Python's library that arguments hold; they are not made either."""

TORCH_NAMES = ("device", "float16", "bfloat16", "float32", "float64")


class _Unpickler(pickle.Unpickler):
    """Unpickler for which every name is a class without code."""

    def find_class(self, module: str, name: str) -> Any:
        root, last = module.partition(".")[0], name.rpartition(".")[2]
        is_library = root in sys.stdlib_module_names and root != "__main__"
        is_class = last[:1].isupper() and "." not in name
        if (module, name) not in PLAIN and (
            is_library or not (is_class or (module == "torch" and name in TORCH_NAMES))
        ):
            raise _RefusedNameError(f"{module}.{name}")
        return type(last, (Record,), {"kind": f"{module}.{name}"})

    def persistent_load(self, identifier: Any) -> Any:
        raise _RefusedNameError("a tensor")


class _RefusedNameError(Exception):
    """A pickle names what has no place in arguments."""


def read_pickled(file: Path) -> dict[str, Any]:
    """Return the arguments of a `training_args.bin` as plain values, with `class`, their class.

    Raises:
        TrainctlError: The file cannot be read, is no such pickle, or names what it should not.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [each for each in archive.infolist() if each.filename.endswith("data.pkl")]
            if len(entries) != 1 or entries[0].file_size > MOST_BYTES:
                raise _damaged(file, "it holds no pickle of a configuration's size")
            text = archive.read(entries[0])
        found = _Unpickler(io.BytesIO(text)).load()
    except _RefusedNameError as error:
        raise TrainctlError(
            f"{file} is refused: its pickle names {error}, which arguments do not have",
            hint="do not load it elsewhere either, unless you trust who made it",
        ) from None
    except (OSError, zipfile.BadZipFile) as error:
        why = getattr(error, "strerror", None) or "it is not what torch.save writes (a zip)"
        raise _damaged(file, why) from None
    except TrainctlError:
        raise
    except Exception as error:  # damaged pickles raise errors of almost any class
        raise _damaged(file, f"its pickle is damaged ({type(error).__name__})") from None
    if not isinstance(found, Record) or not found.fields:
        raise _damaged(file, "it holds no arguments")
    try:
        return {"class": found.kind, **_ArgumentValues().value(found.fields)}
    except (RecursionError, ValueError) as error:
        raise _damaged(file, str(error)) from None


def _damaged(file: Path, why: str) -> TrainctlError:
    return TrainctlError(f"{file} cannot be read: {why}", hint="training_args.bin of a Trainer")


class _ArgumentValues(PlainValues):
    """Conversion of objects to plain values; what has no value of its own is None."""

    def value(self, value: Any, name: str = "", level: int = 0) -> Any:
        """Return a plain value; None for infinity, which settings of DeepSpeed have."""
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return super().value(value, name, level)

    def item(self, key: str, value: Any, name: str, level: int) -> Any:
        """Return the value of a key, without a secret."""
        return REDACTED if value and is_secret_name(key) else super().item(key, value, name, level)

    def other(self, value: Any, name: str, level: int) -> Any:
        """Return the attributes or the only argument of an object, or the name of a type."""
        if isinstance(value, Record):
            if value.fields:
                return self.value(value.fields, name, level + 1)
            plain = [self.value(each, name, level + 1) for each in value.args]
            return plain[0] if len(plain) == 1 else plain or None
        return value.__name__ if isinstance(value, type) else None  # such as torch.bfloat16
