"""What a data source says of itself: its files, and what gives the documents that are in them.

A source knows files and documents. What is held out, the order, the cache of tokens and packing are
the same for all of them, and know no kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import Spec, load, section_class
from trainctl.config.schema import DataConfig, DataFromPaths, SourceConfig
from trainctl.config.text.check import FileProblem
from trainctl.config.text.files import Choose
from trainctl.config.text.remote import File


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource(Spec):
    """What one kind of data source reads, and how.

    Its `build` gives the documents of a file: it is called as ``read(reader, file)``, with a
    `config.text.documents.Reader` that has the section and the policy for bad text, and gives
    `Document`s in order. No torch is loaded then.
    """

    endings: tuple[str, ...] = ()
    """Those of the files that it takes from a folder of `data.paths`, packed or not; a glob takes
    any."""
    choose: Choose | None = None
    """Gives, of all files of such a folder, those that are its corpus, before endings are looked
    at; None takes them by their endings alone."""
    files: Callable[[Any], Sequence[File]] | None = None
    """Gives its files, sorted, of its section; None takes those that `data.paths` names."""
    ranges: Callable[[File, int], list[tuple[int, int]]] | None = None
    """Gives, of a file and a number of bytes, ranges of about so many each that are read by
    themselves, so that many processes read one file; in order, and without gaps where documents
    are. Their two numbers are the source's own: bytes, row groups. Its `build` is then also called
    with one of them, as ``read(reader, file, span)``. None has files read whole."""
    counts_lines: bool = False
    """Whether documents of a range have the number of their line there, as who reads a range of
    lines knows none before it; else that in the file."""
    problem: Callable[..., FileProblem | None] | None = None
    """What is wrong with the beginning of a file, before anything starts; None does not look."""
    is_plain: bool = False
    """Whether a file that is not packed is at least as long as its text, so that a corpus that is
    too short is seen by the sizes of its files."""
    places: Callable[[File], list[int | None]] | None = None
    """Lines of a file's documents, from 1, where all of them are kept; None has the file read again
    to know them."""
    identity: Callable[[Any], str] | None = None
    """Gives, of its section, what its documents depend on beside the files. It is a part of the key
    of the cache; None is the kind and all of its own keys."""
    is_demonstration: bool = False
    """Whether its text serves to try trainctl, not to train a model for use."""
    has_pairs: bool = False
    """Whether each of its documents is a pair of answers, one of them preferred."""
    encoder: str = ""
    """`module:function` that makes the ids of its documents, where that is more than the
    tokenizer's work, and says which of them are learnt: called as ``of(section, tokenizer)``, it
    gives a `data.encoding.Encoder` of marked ids (`data.marks`)."""
    is_tokenized: bool = False
    """Whether its files have ids, which are used where they are. Its `build` is then called as
    ``open(section, file)`` and gives a `data.tokenized.Tokenized`, and `problem` has what is known
    of the tokenizer, a `TokenizerFacts` or None, as its first argument."""
    is_prepared: bool = False
    """Whether it names a corpus that lies prepared elsewhere, and has no files here. Its `build` is
    then called as ``open(section, tokenizer, tell)`` and gives the corpus."""


def spec_of(section: DataConfig) -> DataSource:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("data", section.kind)
    assert isinstance(spec, DataSource)
    return spec


def read_section(plain: Mapping[str, Any]) -> DataConfig:
    """Return a section from plain data, of a run or of one of its sources, as what reads it needs
    it."""
    own = {item.name for item in fields(section_class("data", plain["kind"]))}
    return from_plain(DataConfig, {key: value for key, value in plain.items() if key in own})


def identity_of(section: DataConfig) -> str:
    """What its documents depend on, beside the files and what all sources have."""
    spec = spec_of(section)
    if spec.identity is not None:
        return spec.identity(section)
    shared = {item.name for cls in (DataFromPaths, SourceConfig) for item in fields(cls)}
    own = {name: value for name, value in to_plain(section).items() if name not in shared}
    return f"{spec.name} {json.dumps(own, sort_keys=True)}"
