"""Answers in steps, each step with a label: one answer per document."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.data._records import RecordsConfig, source_of_records
from trainctl.readers.records import steps_of


@dataclass
class StepsConfig(RecordsConfig):
    """Keys of answers in steps."""

    step_separator: str = option(
        "\n", "Text after each step; the step's label belongs to its last token."
    )


SPEC = source_of_records(
    "steps",
    lambda record, section: steps_of(record),
    keys=StepsConfig,
    encoder="trainctl.data.record_encoders:StepsEncoder",
    gives=SampleKind.steps,
)
