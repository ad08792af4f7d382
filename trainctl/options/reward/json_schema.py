"""Whether an answer is JSON that a JSON Schema accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.errors import TrainctlError
from trainctl.models.local_path import local_path
from trainctl.options.reward import Reward, RewardConfig, Score


@dataclass
class JsonSchemaConfig(RewardConfig):
    """The schema, and the rewards."""

    schema: dict[str, Any] = option(
        {},
        "JSON Schema of the answer; an empty one accepts all JSON.",
        example="{type: object, required: [name]}",
    )
    file: str | None = option(None, "JSON file with the schema, in place of `schema`.", local=True)
    column: str | None = option(
        None, "Column of the record that has the schema (an object, or its JSON), in their place."
    )
    valid: float = option(1.0, "Reward of an answer that the schema accepts.")
    invalid: float = option(0.0, "Reward of any other answer.")


def build(section: JsonSchemaConfig) -> Score:
    """Return the reward. A code fence around the JSON is ignored.

    Raises:
        TrainctlError: The file cannot be read, or the schema is none.
        ImportError: The package jsonschema is missing.
    """
    from jsonschema import SchemaError, validators
    from referencing import Registry

    def validator(schema: Any) -> Any:
        of_draft = validators.validator_for(schema)
        of_draft.check_schema(schema)
        return of_draft(schema, registry=Registry())  # fetches no schema that it refers to

    try:
        schema = section.schema
        if section.file is not None:
            schema = json.loads(local_path(section.file).read_bytes())
        fixed = validator(schema)
    except (OSError, ValueError, SchemaError) as error:
        message = str(error).partition("\n")[0]
        raise TrainctlError(
            f"{section.file or 'schema'} is no JSON Schema: {message}", hint="correct the schema"
        ) from None

    def score(prompt: str, answer: str, columns: Mapping[str, Any]) -> float:
        chosen = fixed
        if section.column is not None:
            schema = columns[section.column]
            chosen = validator(json.loads(schema) if isinstance(schema, str) else schema)
        try:
            value = json.loads(_without_fence(answer))
        except (ValueError, RecursionError):
            return section.invalid
        return section.valid if chosen.is_valid(value) else section.invalid

    return score


def _without_fence(answer: str) -> str:
    text = answer.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text.removesuffix("```").partition("\n")[2]
    return text


SPEC = Reward(name="json_schema", keys=JsonSchemaConfig, build=build, modules=("jsonschema",))
