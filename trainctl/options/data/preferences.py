"""Pairs of answers to a prompt, one of them preferred: one pair per document.

A sample is one pair: both answers, each after the prompt. They do not attend to each other.
"""

from __future__ import annotations

from trainctl.options.data import SampleKind
from trainctl.options.data._records import TemplateConfig, source_of_records
from trainctl.readers.conversations import pair_of

SPEC = source_of_records(
    "preferences",
    lambda record, section: pair_of(record),
    keys=TemplateConfig,
    encoder="trainctl.data.record_encoders:PreferenceEncoder",
    gives=SampleKind.pairs,
)
