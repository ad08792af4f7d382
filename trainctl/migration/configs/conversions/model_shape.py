"""Shape of a model that a source describes by numbers, as one of the closed-form families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.errors import Finding
from trainctl.migration.configs.import_table import Conversion

OPTIONS = {
    "llama": "llama-7b",
    "mistral": "mistral-7b",
    "qwen3": "qwen3-8b",
    "gpt2": "gpt2-124m",
}
"""Option of the group `model` whose keys a family's shape replaces."""


def set_shape(source: Conversion, family: str, shape: Mapping[str, Any], name: str) -> None:
    """Choose a family and set its shape.

    Args:
        family: One of `OPTIONS`.
        shape: Values of keys of the section `model`; all that the family's option has, or the
            option's own would be invented.
        name: Key of the source that the choice comes from.
    """
    source.set("model", OPTIONS[family], name)
    for key, value in shape.items():
        source.set(f"model.{key}", value)


def missing_vocabulary(source: Conversion, why: str) -> None:
    """Record that the size of the vocabulary must be given."""
    source.findings.append(
        Finding(
            rule="TC102",
            key="model.vocab_size",
            message=f"the source does not say how large the vocabulary is: {why}",
            hint="model.vocab_size=N",
        )
    )
