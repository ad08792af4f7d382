"""The JSON Schemas, by a validator that is not ours: what is shipped is legal, typos are not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainctl.config.catalog import shipped_root
from trainctl.config.json_schema import option_schema, recipe_schema, value_schema
from trainctl.config.keys import leaves
from trainctl.config.schema import GROUPS
from trainctl.config.yaml_files import _loader_class
from trainctl.errors import TrainctlError

CONF = shipped_root() / "conf"


def read(path: Path) -> Any:
    return yaml.load(path.read_text(), Loader=_loader_class())


@cache
def validator(group: str = "") -> jsonschema.Draft202012Validator:
    """Return a validator of the group's options, or of recipes if no group is given."""
    schema = option_schema(group) if group else recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(document: Any, group: str = "") -> list[str]:
    found = validator(group).iter_errors(document)
    return [".".join(map(str, error.absolute_path)) for error in found]


def test_every_shipped_recipe_is_legal() -> None:
    for path in [*shipped_root().glob("recipes/*.yaml"), CONF / "base.yaml"]:
        assert problems(read(path)) == [], path


def test_every_shipped_option_is_legal() -> None:
    for group in GROUPS:
        for path in (CONF / group).glob("*.yaml"):
            document = read(path)
            document.pop("defaults", None)
            assert problems(document, group) == [], path


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        ("optimizer: {lr: 1.0e-4}", ""),
        ("optimizer: {lrate: 1.0e-4}", "optimizer"),
        ("optimiser: {lr: 1.0e-4}", "*"),
        ("optimizer: {lr: 0}", "optimizer.lr"),
        ("optimizer: {lr: fast}", "optimizer.lr"),
        ("optimizer: {lr: '${oc.env:LR}'}", ""),
        ("zero_stage: {stage: 4}", "zero_stage.stage"),
        ("schedule: {kind: cosin}", "schedule.kind"),
        ("schedule: {warmup_steps: null}", ""),
        ("optimizer: {lr: null}", "optimizer.lr"),
        ("data: {paths: [a, b]}", ""),
        ("data: {paths: a}", "data.paths"),
        ("deepspeed: {aio: {block_size: 1}}", ""),
        ("launcher: {environment: {A: 1}}", ""),
        ("recipe: x", "*"),
        ("script: train.py", ""),
        ("defaults: [tiny, {override /schedule: linear}, _self_]", ""),
        ("defaults: [{override /schdule: linear}]", "defaults.0"),
    ],
)
def test_what_an_editor_would_underline(document: str, wrong: str) -> None:
    found = problems(yaml.safe_load(document))
    assert found == ([] if not wrong else ["" if wrong == "*" else wrong])


def test_every_key_has_its_documentation_and_default() -> None:
    schema = recipe_schema()["properties"]
    for leaf in leaves().values():
        if leaf.key == "recipe":
            continue
        node: Any = {"properties": schema}
        for name in leaf.key.split("."):
            node = node["properties"][name]
        assert node["default"] == leaf.default
        assert node["description"].startswith(leaf.metadata["doc"])


def test_an_unknown_group_is_reported_with_the_nearest() -> None:
    with pytest.raises(TrainctlError, match="no group optimiser") as caught:
        option_schema("optimiser")
    assert caught.value.hint.startswith("did you mean optimizer?")


def test_numbers_with_a_unit_may_be_written_with_a_suffix() -> None:
    def accepts(key: str, value: object) -> bool:
        section, name = key.split(".")
        schema = value_schema(leaves()[f"{section}.{name}"])
        return not list(jsonschema.Draft202012Validator(schema).iter_errors(value))

    assert accepts("training.tokens", "1.5T")
    assert accepts("training.tokens", 1500)
    assert not accepts("training.tokens", "4X")
    assert not accepts("training.tokens", "2GB")
    assert accepts("training.steps", "4M") and accepts("data.max_bytes", "1.5GiB")
    assert accepts("training.time_limit_minutes", "4h") and accepts("schedule.milestones", ["8k"])
    assert not accepts("model.hidden_size", "4k")
