"""Objects in pickles whose classes are not imported."""

from __future__ import annotations

from typing import Any


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
