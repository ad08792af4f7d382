"""Recipes as text: base, chosen options, and set keys; such as that of a found plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from os import PathLike
from pathlib import Path
from shlex import join, quote
from typing import Any

from trainctl.config.catalog import BASE, recipe_names, search_folders, split_hardware
from trainctl.config.codec import nest, to_plain, value_at
from trainctl.config.compose import ComposedConfig
from trainctl.config.json_schema import link_recipe
from trainctl.config.overrides import ALIASES, split_target
from trainctl.config.quantities import seconds_text
from trainctl.config.schema import GROUPS
from trainctl.errors import TrainctlError
from trainctl.tuning.search import FoundPlan, Search


def check_recipe_file(path: Path, config_dir: Path | None) -> None:
    """Refuse a target that no recipe can be written to, before the search."""
    if path.suffix != ".yaml":
        raise TrainctlError(
            f"--write {path}: recipes end in .yaml", hint=f"--write {path.with_suffix('.yaml')}"
        )
    if path.exists():
        raise TrainctlError(f"--write {path}: the file is there already", hint="name another one")
    if not path.absolute().parent.is_dir():
        raise TrainctlError(
            f"--write {path}: there is no folder {path.parent}", hint=f"mkdir -p {path.parent}"
        )
    if path.stem in (BASE, *recipe_names(search_folders(config_dir))):
        raise TrainctlError(
            f"--write {path}: it would hide the recipe {path.stem} that is there already",
            hint="name another one",
        )


def plan_recipe(composed: ComposedConfig, found: FoundPlan, comment: Sequence[str]) -> str:
    """Return a found plan as a recipe that extends the recipe of the configuration."""
    plain = to_plain(composed.config)
    choices: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for override in composed.overrides:
        name, _, value = override.partition("=")
        name = ALIASES.get(name, name)
        if name in GROUPS:
            devices = None
            if name == "hardware":
                _, devices, value = split_hardware(value)
            choices[name] = value
            if devices is not None:
                for key in ("hardware.nodes", "hardware.devices_per_node"):
                    settings[key] = value_at(plain, key)
        elif name != "recipe":
            settings[name] = value_at(plain, name)
    for key, layers in composed.layers.items():
        # The saved recipe extends the recipe, whose values a chosen option has replaced here.
        is_replaced = any("recipes/" in layer.source for layer in layers[:-1])
        if is_replaced and key.partition(".")[0] in choices and _has_key(plain, key):
            settings.setdefault(key, value_at(plain, key))
    settings |= {key: getattr(value, "value", value) for key, value in found.values.items()}
    return recipe_text(comment, composed.config.recipe or BASE, choices, settings)


def write_plan_recipe(
    path: Path, composed: ComposedConfig, found: FoundPlan, result: Search, config_dir: Path | None
) -> None:
    """Write a found plan as a recipe; see `plan_recipe`.

    Raises:
        TrainctlError: Like `check_recipe_file`, or the configuration says no length.
    """
    check_recipe_file(path, config_dir)
    if not result.has_length and composed.config.training.epochs is None:
        raise TrainctlError(
            "a recipe says how long it trains, and nothing does",
            hint="training.tokens=1T, or training.steps=1000",
        )
    comment = [f"{found.plan.config.model.name} on {found.plan.hardware.name}, by trainctl plan."]
    if result.rates_are_known:
        rate = found.tokens_per_second_per_device
        step = seconds_text(found.time.seconds)
        comment.append(f"Predicted: {step} a step, {rate:,.0f} tokens/s a device.")
    text = plan_recipe(composed, found, comment)
    path.write_text(f"{link_recipe(path, config_dir)}{text}\n", encoding="utf-8")


def launch_command(path: Path, config_dir: Path | None) -> str:
    """Return the command that launches a recipe of the user's, which may lie in any folder."""
    folder = path.absolute().parent
    if folder == Path.cwd() / "recipes":
        return f"trainctl launch recipe={quote(path.stem)}"
    if config_dir is not None or any((folder / name).is_dir() for name in ("conf", "recipes")):
        return f"trainctl launch recipe={quote(path.stem)} (from a folder of recipes/)"
    return f"trainctl launch --config-dir {quote(str(path.parent))} recipe={quote(path.stem)}"


def start_command(arguments: Sequence[str], config_dir: str | PathLike[str] | None) -> str:
    """Return the command that launches a configuration, or resumes the run that comes first."""
    verb = "launch" if split_target(arguments)[0] is None else "resume"
    folder = () if config_dir is None else ("--config-dir", str(config_dir))
    return join(["trainctl", verb, *folder, *arguments])


def _has_key(plain: Any, key: str) -> bool:
    *parents, name = key.split(".")
    return name in value_at(plain, ".".join(parents))


def recipe_text(
    comment: Sequence[str], base: str, choices: Mapping[str, str], settings: Mapping[str, Any]
) -> str:
    """Return the recipe as YAML.

    Args:
        comment: Lines of the comment on top.
        base: Recipe to start from, or `base`.
        choices: Options by group, where they differ from the base.
        settings: Plain values by dotted key.
    """
    lines = [f"# {line}" for line in comment] + ["defaults:", f"  - {base}"]
    lines += [f"  - override /{group}: {dumps(option)}" for group, option in choices.items()]
    lines.append("  - _self_")
    return "\n".join([*lines, *_yaml_lines(nest(settings.items()), "")])


def _yaml_lines(level: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in level.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", *_yaml_lines(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{name}: {dumps(value)}")
    return lines
