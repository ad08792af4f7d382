"""The JSON Schema of DeepSpeed's JSON: what we render is legal, at every key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trainctl.rules.deepspeed_schema import deepspeed_schema

GOLDEN = sorted(Path(__file__).parent.glob("golden/*.json"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = deepspeed_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_what_we_render_is_legal(validator: Any, path: Path) -> None:
    problems = [error.message for error in validator.iter_errors(json.loads(path.read_text()))]
    assert problems == []


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stagee": 1}}, "zero_optimization"),
        ({"zero_optimisation": {"stage": 1}}, ""),
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"train_batch_size": "auto"}, None),
        ({"communication_data_type": "BF16"}, None),
        ({"communication_data_type": "int8"}, "communication_data_type"),
        ({"optimizer": {"type": "AdamW", "params": {"whatever": 1}}}, None),
        ({"zero_optimization": {"offload_optimizer": None}}, None),
    ],
)
def test_what_an_editor_would_underline(
    validator: Any, document: dict[str, Any], wrong: str | None
) -> None:
    found = [".".join(map(str, e.absolute_path)) for e in validator.iter_errors(document)]
    assert found == ([] if wrong is None else [wrong])
