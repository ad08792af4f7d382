"""Composition is Hydra's: the same files and overrides give the values that Hydra's own `compose`
gives, over every recipe and two thousand random overrides; and each file is read once.

One rule is ours (decision 19): an option chosen on the command line replaces its whole section.
Hydra is asked for that too: for the section as the option alone makes it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from whole_recipes import WHOLE

from trainctl.config.catalog import chosen_options, option_names, search_folders, shipped_root
from trainctl.config.check import REFUSED
from trainctl.config.codec import from_plain, to_plain
from trainctl.config.compose import compose
from trainctl.config.keys import Leaf, ValueProblem, convert_value, leaves, leaves_under
from trainctl.config.layers import ALTERNATIVES
from trainctl.config.registry import kind_key, unit_groups
from trainctl.config.schema import GROUPS, RunConfig
from trainctl.errors import TrainctlError
from trainctl.options.objective import objective_of

RECIPES = [None, *WHOLE]
SETTINGS, REFERENCES = 80, 30
"""Number of keys set per recipe, and of keys that refer to them."""
NOT_DRAWN = (
    "recipe",
    "model.family",
    "model.path",
    "model.anatomy",
    "model.score_outputs",
    "model.future_blocks",
    "deepspeed",
    "logging.alerts.urls",
    *(key for keys in ALTERNATIVES for key in keys),
)
"""Keys that are not drawn: keys that no file sets, keys that read a directory, keys with cases of
their own, secrets, and alternatives where one key takes back another.
"""
SIGNS = ("", "", "+", "++")


# ------------------------------------------------------------------------ what Hydra composes


@contextmanager
def hydras(users: Path | None = None) -> Iterator[None]:
    """Hydra over the folders that trainctl searches, the user's first."""
    root = shipped_root()
    places = [users / "conf", users / "recipes"] if users else []
    paths = [f"file://{path}" for path in (*places, root / "conf", root / "recipes")]
    store = ConfigStore.instance()
    # Where options are units, each kind has defaults of its own, which `from_plain` adds.
    known = {key: value for key, value in to_plain(RunConfig()).items() if key not in unit_groups()}
    store.store(name="_schema", node=known)
    store.store(name="_searched", node={"hydra": {"searchpath": paths}})
    with hydra.initialize(None, version_base="1.3"):
        yield


def hydra_compose(defaults: Sequence[Any], overrides: Sequence[str]) -> DictConfig:
    """Compose a defaults list over the schema by Hydra itself, without resolving references."""
    searched = ConfigStore.instance().load("_searched.yaml").node
    node = {"defaults": ["_schema", *defaults, "_self_"], **OmegaConf.to_container(searched)}
    ConfigStore.instance().store(name="_asked", node=node)
    return hydra.compose("_asked", overrides=list(overrides))


@cache
def hydra_choices(recipe: str, users: Path | None) -> dict[str, str | None]:
    """Option of each group that a recipe comes to by Hydra's own reading in `hydras(users)`."""
    hydra_compose([recipe], [])
    loader = GlobalHydra.instance().config_loader()
    listed = loader.compute_defaults_list("_asked", [], RunMode.RUN)
    return dict(listed.overrides.known_choices)


def expected(
    recipe: str | None,
    choices: dict[str, str],
    settings: Sequence[str],
    users: Path | None = None,
) -> RunConfig:
    """Compose the configuration by Hydra. The section of a chosen option is composed without the
    recipe, unless the recipe has the same choice.
    """
    own = hydra_choices(recipe or "base", users)
    chosen = chosen_options(search_folders(users), recipe or "base")
    assert {group: each for group, each in chosen.items() if group in GROUPS}.items() <= own.items()
    choices = {group: option for group, option in choices.items() if own[group] != option}
    asked = [f"{group}='{option}'" for group, option in choices.items()]
    composed = hydra_compose([recipe or "base"], [*asked, *settings])
    if choices:
        inside = [text for text in settings if text.lstrip("+").split(".")[0] in choices]
        alone = hydra_compose([{group: option} for group, option in choices.items()], inside)
        with flag_override(composed, "struct", False):
            for group in choices:
                composed[group] = deepcopy(alone[group])
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    found = from_plain(RunConfig, values | {"recipe": recipe})
    spec = objective_of(found.objective)  # filled in, whatever is set
    head, further = spec.head, spec.future_blocks
    found.model.score_outputs = None if head is None else head.outputs(found.objective)
    found.model.future_blocks = None if further is None else further(found.objective)
    return found


# ------------------------------------------------------------------------ what is drawn


def as_override(value: Any) -> str:
    """Write a value in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(as_override(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return f"'{value}'"
    return json.dumps(value)


def values_of(leaf: Leaf, dice: random.Random) -> Iterator[Any]:
    """Values that the key may take, the likely ones first."""
    for kind in (leaf.hint, *get_args(leaf.hint)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            yield dice.choice(list(kind)).value
    yield from dice.sample([dice.randint(0, 9999), dice.random(), True, False, None], 5)
    yield from dice.sample(["a b", "x,y=z", "1e-4", "~/a:b", ["a", "b, c"], [1], [0.5, 1.5]], 7)


def drawn(leaf: Leaf, dice: random.Random) -> Any:
    """Draw a value that the key accepts unchanged, or return the key's default if there is none."""
    for value in values_of(leaf, dice):
        try:
            if convert_value(leaf, value) == value and type(convert_value(leaf, value)) is type(
                value
            ):
                return value
        except ValueProblem:
            continue
    return leaf.default


def draw_settings(dice: random.Random, around: RunConfig) -> list[str]:
    """Draw overrides without their signs: values of single keys, then references to these keys.

    The kinds in `around` decide which keys there are.
    """
    kinds = {f"{group}.{kind_key(group)}" for group in unit_groups()}
    known = [
        leaf
        for leaf in leaves_under(to_plain(around)).values()
        if not leaf.key.startswith(NOT_DRAWN) and not leaf.is_mapping and leaf.key not in kinds
    ]
    picked = {leaf.key: drawn(leaf, dice) for leaf in dice.sample(known, SETTINGS)}
    settings = [f"{key}={as_override(value)}" for key, value in picked.items()]
    for target in dice.sample(known, REFERENCES):
        for key, value in picked.items():
            if target.key not in picked and _takes(target, value) and value is not None:
                settings.append(f"{target.key}=${{{key}}}")
                break
    return settings


def _takes(leaf: Leaf, value: Any) -> bool:
    try:
        return bool(convert_value(leaf, value) == value) and type(leaf.default) is type(value)
    except ValueProblem:
        return False


def draw_choices(dice: random.Random) -> dict[str, str]:
    """Options of up to four groups."""
    folders = search_folders()
    groups = dice.sample([group for group in GROUPS if group != "model"], dice.randint(0, 4))
    return {group: dice.choice(option_names(folders, group)) for group in groups}


# ------------------------------------------------------------------------ the two are equal


@pytest.mark.parametrize("recipe", RECIPES[::2])
def test_values_match_hydras_own_composition(recipe: str | None) -> None:
    dice = random.Random(f"{recipe}")
    named = [f"recipe={recipe}"] if recipe else []
    choices = draw_choices(dice)
    chosen = [*named, *(f"{group}={option}" for group, option in choices.items())]
    settings = draw_settings(dice, compose(chosen).config)
    asked = [*chosen, *(f"{dice.choice(SIGNS)}{setting}" for setting in settings)]
    dice.shuffle(asked)
    # Hydra's `+` refuses a key that is there, and no sign one that is not; `++` takes both.
    with hydras():
        wanted = expected(recipe, choices, [f"++{setting}" for setting in settings])
    assert compose(asked).config == wanted, asked


@pytest.mark.parametrize(
    "number", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 8))]
)
def test_options_of_every_group_at_once_are_what_hydra_makes_of_them(number: int) -> None:
    folders = search_folders()
    names = {group: [n for n in option_names(folders, group) if n != "hf"] for group in GROUPS}
    choices = {group: options[number % len(options)] for group, options in names.items()}
    with hydras():
        wanted = expected("tiny", choices, [])
    asked = [f"{group}={option}" for group, option in choices.items()]
    assert compose(["recipe=tiny", *asked]).config == wanted


@pytest.mark.parametrize(
    "settings",
    [
        ["deepspeed={a: 1, b: {c: 2}}", "deepspeed.b.d=[1, {e: null}]", "+deepspeed.f=x"],
        ["+deepspeed.a.b=1", "+deepspeed.a.c=true", "deepspeed.a.b=${training.seed}"],
        ["deepspeed.a={b: 1}", "deepspeed.a={c: 2}"],
        ["deepspeed.a={b: 1}", "deepspeed.a=3", "deepspeed.d={}"],
        ["deepspeed.a=[1, 2]", "deepspeed.a=[3]"],
        ["deepspeed.path=${model.name}/${training.seed}", "training.seed=7"],
        ["training.seed=${deepspeed.seeds.0}", "deepspeed.seeds=[5]"],
        ["training.seed=${training.steps}", "training.steps=${model.num_layers}"],
        ["training.steps=${oc.decode:'5'}", "training.seed=${oc.select:no.such,4}"],
    ],
)
def test_free_form_keys_and_references_are_hydras(settings: list[str]) -> None:
    with hydras():
        forced = [f"++{setting.lstrip('+')}" for setting in settings]
        wanted = expected("tiny", {}, forced)
    assert compose(["recipe=tiny", *settings]).config == wanted


@pytest.mark.parametrize(
    "override",
    ["~training.seed", "~optimizer", "optimizer@other=lion", "+optimizer@training=lion", "a/b=c"],
)
def test_what_hydra_takes_and_we_refuse_is_refused_in_words(override: str) -> None:
    with pytest.raises(TrainctlError) as caught:
        compose([override])
    assert [finding.rule for finding in caught.value.findings if finding.is_error] == [REFUSED]


# ------------------------------------------------------------------------ files of the users


def draw_folder(dice: random.Random, folder: Path) -> list[str]:
    """Options that extend options and recipes that extend recipes; the recipes' names."""
    groups = ("optimizer", "schedule", "data", "checkpoint")
    own: dict[str, str] = {}
    for group in groups:
        parent = dice.choice(option_names(search_folders(), group))
        lines = [f"  - {parent}", "  - _self_"]
        body = _body(dice, group, "")
        _write(folder / "conf" / group / "own.yaml", ["defaults:", *lines, *body])
        own[group] = "own"
    names: list[str] = []
    for number in range(4):
        parent = dice.choice([*names, "base", "tiny", "7b-zero3"])
        picked = dice.sample(groups, 2)
        chosen = [dice.choice([own[group], "null"]) for group in picked]
        overrides = [
            f"  - override /{group}: {option}" for group, option in zip(picked, chosen, strict=True)
        ]
        start = dice.choice([[f"  - {parent}", "  - _self_"], ["  - _self_", f"  - {parent}"]])
        header = dice.choice([[], ["# @package _global_"]])
        body = [
            line
            for section in ("training", "optimizer", "logging")
            for line in [f"{section}:", *_body(dice, section, "  ")]
        ]
        names.append(f"mine-{number}")
        _write(
            folder / "recipes" / f"mine-{number}.yaml",
            [*header, "defaults:", *start, *overrides, *body],
        )
    return names


def _body(dice: random.Random, section: str, indent: str) -> list[str]:
    inside = [leaf for leaf in leaves().values() if leaf.key.startswith(f"{section}.")]
    # Keys that every kind has, but for the one that says the kind.
    plain = [
        leaf
        for leaf in inside
        if not (leaf.is_mapping or leaf.kinds or leaf.key.endswith(".kind"))
        and not leaf.key.startswith(NOT_DRAWN)
    ]
    values: dict[str, Any] = {}
    for leaf in dice.sample(plain, min(4, len(plain))):
        *parents, name = leaf.key.split(".")[1:]
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = drawn(leaf, dice)
    return [f"{indent}{name}: {json.dumps(value)}" for name, value in values.items()]


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_files_of_the_users_are_laid_as_hydra_lays_them(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    for name in draw_folder(dice, tmp_path):
        choices = dice.choice([{}, {"optimizer": "own"}, {"schedule": "own", "data": "own"}])
        asked = [f"recipe={name}", *(f"{group}={option}" for group, option in choices.items())]
        with hydras(tmp_path):
            wanted = expected(name, choices, [], tmp_path)
        assert compose(asked, config_dir=tmp_path).config == wanted, name


# ------------------------------------------------------------------------ each is read once

COUNT = """
import collections, json, sys
opened = collections.Counter()
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".yaml"):
        opened[str(arguments[0])] += 1
sys.addaudithook(hook)
from trainctl.cli.main import run
run(sys.argv[1:])
print(json.dumps(opened))
"""


@pytest.mark.parametrize("command", [["validate", "recipe=7b-zero3", "zero_stage=2"], ["recipes"]])
def test_a_command_opens_each_file_once(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    opened = json.loads(done.stdout.splitlines()[-1])
    assert len(opened) > 15
    assert set(opened.values()) == {1}, opened
    assert all(Path(path).is_relative_to(shipped_root()) for path in opened)
