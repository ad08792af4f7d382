"""The closed schema of DeepSpeed's JSON: every key with its type, default and range.

A file of this folder for each version of DeepSpeed, written by
`scripts/generate_deepspeed_schema.py` from the installed package. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path as FilePath
from typing import Any

Path = tuple[str, ...]
"""Where a value is in the JSON: `("zero_optimization", "stage")`."""

FOLDER = FilePath(__file__).parent


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the JSON."""

    name: str
    type: str
    """`integer`, `number`, `boolean`, `string`, `list`, `section`, or `any`."""
    default: Any = None
    """What DeepSpeed takes when the key is left out; none where that depends on others."""
    choices: tuple[Any, ...] = ()
    """The legal values; empty where any of the type is."""
    any_case: bool = False
    """Whether DeepSpeed ignores the case of a choice."""
    items: tuple[Any, ...] = ()
    """The legal values in a list; empty where any is."""
    minimum: float | None = None
    """Smallest legal value, inclusive."""
    maximum: float | None = None
    """Largest legal value, inclusive."""
    above: float | None = None
    below: float | None = None
    null: bool = False
    """Whether null is legal."""
    checked: bool = False
    """Whether DeepSpeed itself refuses a wrong type (its sections that are pydantic models);
    otherwise a wrong value goes wherever it goes."""
    refuses_switch: bool = False
    """Whether a number of a section that is checked may not be true or false."""
    unknown: str = ""
    """What an unknown key in a section meets: `refused`, `ignored`, or `free` where the section may
    hold anything."""
    replaced: str = ""
    """What a deprecated key has been replaced by; empty for the others."""
    sets_replacement: bool = False
    """Whether DeepSpeed takes a deprecated key's value over."""
    same_as: str = ""
    """The name in the JSON of which this is another spelling; empty for the others."""

    @property
    def is_section(self) -> bool:
        return self.type == "section"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a schedule takes: all names, and those without a default."""

    names: tuple[str, ...]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """The JSON of one version of DeepSpeed."""

    deepspeed: str
    """The version of DeepSpeed."""
    torch: str
    """The version of torch that its torch optimizers and schedules are of."""
    keys: Mapping[str, Key]
    """Every key, by dotted name."""
    removed: Mapping[str, str]
    """Keys that DeepSpeed refuses since it removed them, and what replaces each."""
    optimizers: Mapping[str, Mapping[str, tuple[str, ...]]]
    """DeepSpeed's own, by lower-case name: the names in `optimizer.params` for each variant
    (`device`, `offloaded`, `torch`); no variant where another package has it."""
    torch_optimizers: Mapping[str, tuple[str, ...]]
    """Classes of torch.optim, and their names in `optimizer.params`."""
    schedulers: Mapping[str, Arguments]
    """DeepSpeed's schedules and what each takes as `scheduler.params`."""
    torch_schedulers: Mapping[str, Arguments]
    """Classes of torch.optim.lr_scheduler, likewise."""

    def find(self, path: Path) -> Key | None:
        """The key at a path; none if there is none. A name with a dot in it is never one."""
        if any("." in name for name in path):
            return None
        return self.keys.get(".".join(path))

    def inside(self, section: Path) -> list[str]:
        """Names of the keys of a section; of the whole JSON for the empty path."""
        prefix = "".join(f"{name}." for name in section)
        names = (key[len(prefix) :] for key in self.keys if key.startswith(prefix))
        return [name for name in names if "." not in name]


def versions() -> list[str]:
    """Versions that there is a schema of, the oldest first."""
    found = [path.stem for path in FOLDER.glob("*.json")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


@cache
def load(version: str | None = None) -> Schema:
    """The schema of a version, or the newest."""
    path = FOLDER / f"{version or versions()[-1]}.json"
    plain = json.loads(path.read_text(encoding="utf-8"))
    return Schema(
        deepspeed=plain["deepspeed"],
        torch=plain["torch"],
        keys={name: _key(name, note) for name, note in plain["keys"].items()},
        removed=plain["removed"],
        optimizers={
            name: {variant: tuple(names) for variant, names in variants.items()}
            for name, variants in plain["optimizers"].items()
        },
        torch_optimizers={k: tuple(names) for k, names in plain["torch_optimizers"].items()},
        schedulers={name: _arguments(note) for name, note in plain["schedulers"].items()},
        torch_schedulers={k: _arguments(note) for k, note in plain["torch_schedulers"].items()},
    )


def _key(name: str, note: Mapping[str, Any]) -> Key:
    lists = {part: tuple(note[part]) for part in ("choices", "items") if part in note}
    return Key(name=name, **{**note, **lists})


def _arguments(note: Mapping[str, list[str]]) -> Arguments:
    return Arguments(tuple(note["names"]), tuple(note["required"]))
