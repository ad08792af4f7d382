"""Specification of a data source: its files, and the reader of their documents.

A source provides files and documents. The held-out split, the order, the token cache and packing
are the same for all sources and independent of their kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import Spec, section_class, spec_lookup
from trainctl.config.schema import DataConfig, DataFromPaths, SourceConfig
from trainctl.config.secrets import redact_text
from trainctl.readers.check import FileProblem
from trainctl.readers.files import Choose
from trainctl.readers.remote import File, is_url, modules_of_url


class SampleKind(StrEnum):
    """Kinds of samples, by the nouns for them in messages.

    All but `text` are records: one record is one sample, a row of documents that do not attend to
    each other, perhaps with numbers beside them (`MicroBatch.targets`).
    """

    text = "texts"
    """Packed tokens: a sample is a part of one text, or of several."""
    pairs = "pairs of answers"
    """Two answers to a prompt, each after the prompt; the first one is preferred."""
    answers = "single answers with a label"
    """An answer after its prompt; target: whether it is good."""
    labelled = "texts with labels"
    """A text; targets: its class, classes or numbers."""
    steps = "answers with labels of their steps"
    """An answer after its prompt; targets: the labels of the marked positions, in order."""
    similar = "queries with similar texts"
    """A query, a similar text, and texts that are not similar."""
    prompts = "prompts"
    """A prompt, perhaps with what a reward function is told about its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource(Spec):
    """Specification of one kind of data source.

    Its `build` yields the documents of a file. It is called as ``read(reader, file)``, with a
    `readers.documents.Reader` that holds the section and the policy for bad text, and yields
    `Document`s in order. No torch is loaded then.
    """

    endings: tuple[str, ...] = ()
    """Endings of the files to read from a folder in `data.paths`, compressed or not; a glob selects
    files of any ending.
    """
    choose: Choose | None = None
    """Function that selects the corpus's files from all files of such a folder, before their
    endings are checked; None selects by ending alone.
    """
    files: Callable[[Any], Sequence[File]] | None = None
    """Function that returns the sorted files of a section; None takes the files in `data.paths`."""
    ranges: Callable[[File, int], list[tuple[int, int]]] | None = None
    """Function that splits a file into ranges of about the given number of bytes, so that several
    processes can read it. Ranges are in order, without gaps between documents. The unit of their
    two numbers is the source's own: bytes, row groups. `build` is then also called with one range,
    as ``read(reader, file, span)``. If None, a file is read as a whole.
    """
    counts_lines: bool = False
    """Whether documents of a range are numbered by their line in the range, because a reader of a
    range does not know the lines before it. Otherwise they are numbered within the file.
    """
    problem: Callable[..., FileProblem | None] | None = None
    """Function that checks the beginning of a file before a start, and returns what is wrong; None
    checks nothing.
    """
    is_plain: bool = False
    """Whether an uncompressed file is at least as long as its text, so that file sizes show that a
    corpus is too short.
    """
    places: Callable[[File], list[int | None]] | None = None
    """Function that returns the lines of a file's documents, from 1, if all documents are kept;
    None means that the file must be read again to know them.
    """
    identity: Callable[[Any], str] | None = None
    """Function that returns, for a section, what its documents depend on beside the files: a part
    of the cache key. None uses the kind and all of its own keys.
    """
    is_demonstration: bool = False
    """Whether its text is for trying trainctl, not for training a useful model."""
    gives: SampleKind = SampleKind.text
    """Kind of its samples, which a run's objective must take."""
    begins_texts: bool = True
    """Whether `data.begin_documents` says what its documents or prompts begin with."""
    encoder: str = ""
    """`module:function` that makes the encoder of its documents, if a tokenizer is not enough, and
    that marks the ids to learn. It is called as ``of(section, tokenizer)`` and returns a
    `data.tokenizer.Encoder` of marked ids (`data.token_arrays`).
    """
    is_tokenized: bool = False
    """Whether its files hold ids, which are used in place. `build` is then called as
    ``open(section, file)`` and returns a `data.tokenized.Tokenized`; `problem` gets a
    `TokenizerFacts`, or None, as its first argument.
    """
    is_prepared: bool = False
    """Whether it names a corpus that was prepared elsewhere and has no files here. `build` is then
    called as ``open(section, tokenizer, tell)`` and returns the corpus.
    """


spec_of = spec_lookup(DataConfig, DataSource)
"""Return the specification of the configured data source."""


def read_section(plain: Mapping[str, Any]) -> DataConfig:
    """Return the section of a run, or of one of its sources, from plain data, without keys of
    others.
    """
    own = {item.name for item in fields(section_class("data", plain["kind"]))}
    return from_plain(DataConfig, {key: value for key, value in plain.items() if key in own})


def modules_of_source(section: DataConfig) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the keys of a source, with their values, that need modules of an extra."""
    spec = spec_of(section)
    if spec.modules:
        yield "kind", spec.name, spec.modules
    url = getattr(section, "url", None)
    places = [("paths", path) for path in getattr(section, "paths", [])]
    for key, place in [*places, *([("url", url)] if url else [])]:
        if is_url(place) and not place.startswith("file://"):
            yield key, redact_text(place), modules_of_url(place)
        if place.endswith(".zst"):
            yield key, redact_text(place), ("zstandard",)


def document_identity(section: DataConfig) -> str:
    """Return what a source's documents depend on, beside its files and the keys that all sources
    share.
    """
    spec = spec_of(section)
    if spec.identity is not None:
        return spec.identity(section)
    shared = {item.name for cls in (DataFromPaths, SourceConfig) for item in fields(cls)}
    own = {name: value for name, value in to_plain(section).items() if name not in shared}
    return f"{spec.name} {json.dumps(own, sort_keys=True)}"
