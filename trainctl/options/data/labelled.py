"""Texts, or pairs of texts, with labels: one per document."""

from __future__ import annotations

import json
from dataclasses import dataclass

from trainctl.config.schema import DataFromRecords
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.data._records import source_of_records
from trainctl.readers.records import labelled_of


@dataclass
class LabelledConfig(DataFromRecords):
    """Keys of labelled texts."""

    pair_key: str | None = option(
        None, "Key or column of the second text, if a record is a pair of texts; none if it is one."
    )
    label_key: str = option(
        "label",
        "Key or column of the label: a class as a number or a name, a list of classes, or numbers "
        "to predict.",
    )
    classes: list[str] = option(
        [], "Names of the classes in the order of their numbers; empty sorts those of the records."
    )


SPEC = source_of_records(
    "labelled",
    lambda record, section: labelled_of(
        record, section.text_key, section.pair_key, section.label_key, section.classes
    ),
    identity=lambda section: json.dumps(
        [section.text_key, section.pair_key, section.label_key, section.classes]
    ),
    keys=LabelledConfig,
    encoder="trainctl.data.record_encoders:TextEncoder",
    gives=SampleKind.labelled,
    begins_texts=False,
)
