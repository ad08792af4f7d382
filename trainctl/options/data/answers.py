"""Single answers to prompts, each good or bad: one answer per document.

A sample is one answer after its prompt, and beside it the answer of the record before after the
same prompt, which `objective=kto` takes its baseline from. They do not attend to each other.
"""

from __future__ import annotations

from trainctl.options.data import SampleKind
from trainctl.options.data._records import TemplateConfig, source_of_records
from trainctl.readers.records import answer_of

SPEC = source_of_records(
    "answers",
    lambda record, section: answer_of(record),
    keys=TemplateConfig,
    encoder="trainctl.data.record_encoders:AnswerEncoder",
    gives=SampleKind.answers,
)
