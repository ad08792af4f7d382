"""Copies of the examples under a name of the user's, in the user's folder."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import join

import yaml

from trainctl.config.json_schema import schema_comment
from trainctl.config.registry import list_shipped
from trainctl.errors import TrainctlError

EXAMPLES = Path(__file__).parent
TRIAL = {
    "callbacks": ("callbacks=[{}]",),
    "data": ("data={}", "data.paths=[{}]"),
    "logger": ("logging.to=[{}]",),
}
"""Overrides that try an option of a group, where `GROUP=NAME` does not."""


@dataclass(frozen=True, slots=True)
class NewPart:
    """An option, or a model, that was written."""

    files: tuple[Path, ...]
    commands: tuple[str, ...]
    """Commands that run its test and try it, for the current folder."""


def write_part(group: str, name: str, folder: Path) -> NewPart:
    """Write the example of a group as an option (or a model) of the user's, with its test.

    Raises:
        TrainctlError: The name cannot be used, or a file is there already. Nothing is written.
    """
    _check_name(group, name)
    (test,) = (EXAMPLES / group).glob("test_*.py")
    example = test.stem.removeprefix("test_")
    code = folder if group == "model" else folder / "options" / group
    files = {code / f"{name}.py": EXAMPLES / group / f"{example}.py"}
    values = EXAMPLES / group / f"{example}.yaml"
    if values.exists():
        files[folder / "conf" / group / f"{name}.yaml"] = values
    files[folder / "tests" / f"test_{group}_{name}.py"] = test
    for path in files:
        if path.exists():
            raise TrainctlError(f"{path} is there already", hint="choose another name")
    for path, source in files.items():
        text = _renamed(source.read_text(encoding="utf-8"), example, name)
        if path.suffix == ".yaml":
            text = schema_comment(path, folder, group) + text
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as out:
            out.write(text)
    trial = [
        each.format(",".join(map(str, files)) if "paths" in each else name)
        for each in TRIAL.get(group, (f"{group}={{}}",))
    ]
    # A model's function is searched in the folder of the launch, whose conf/ is found too.
    trust = [] if group == "model" else ["--trust-code", "--config-dir", str(folder)]
    enter = f"{join(['cd', str(folder)])} && " if group == "model" and folder != Path() else ""
    launch = join(["trainctl", "launch", *trust, "recipe=tiny", *trial, "training.steps=20"])
    return NewPart(
        files=tuple(files),
        commands=("python -m " + join(["pytest", str(path)]), enter + launch),
    )


def _check_name(group: str, name: str) -> None:
    """Raise if no option of the user's can have the name.

    Raises:
        TrainctlError: It is no plain name of Python and YAML, or a shipped option has it.
    """
    is_plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) and not keyword.iskeyword(name)
    if not is_plain or yaml.safe_load(name) != name:
        near = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower()
        raise TrainctlError(
            f"{name!r} cannot be the name of an option",
            hint=f"use letters, digits and _, after a letter: my_{near or group}",
        )
    if name in list_shipped(group):
        raise TrainctlError(
            f"{group}={name} is trainctl's own, and cannot be replaced",
            hint=f"choose another name: my_{name}",
        )
    installed = find_spec(name) if group == "model" else None
    if installed is not None and installed.origin is not None:  # a mere folder hides no module
        raise TrainctlError(
            f"a module of the name {name} is installed, and would be found in place of yours",
            hint=f"choose another name: my_{name}",
        )


def _renamed(text: str, example: str, name: str) -> str:
    """Return an example's text with another name: in its spec, keys, tests and class names."""
    text = re.sub(rf'(?<=["=]){example}\b', name, text)
    text = re.sub(rf"(?m)^(kind|name|factory): {example}\b", rf"\1: {name}", text)
    camel, own = (each.title().replace("_", "") for each in (example, name))
    return re.sub(rf"\b{camel}(?=Keys|Rule|Sink|Callback)", own, text)
