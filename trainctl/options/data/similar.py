"""Queries with a similar text, and perhaps with texts that are not similar: one per document.

A sample is the query, the similar text and the others. They do not attend to each other.
"""

from __future__ import annotations

from trainctl.options.data import SampleKind
from trainctl.options.data._records import RecordsConfig, source_of_records
from trainctl.readers.records import similar_of

SPEC = source_of_records(
    "similar",
    lambda record, section: similar_of(record),
    keys=RecordsConfig,
    encoder="trainctl.data.record_encoders:SimilarEncoder",
    gives=SampleKind.similar,
    begins_texts=False,
)
