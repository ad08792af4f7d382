"""Token ids made by other programs: used in place, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trainctl.config.registry import function_of
from trainctl.config.schema import DataFromPaths
from trainctl.config.schema.option import option
from trainctl.errors import TrainctlError
from trainctl.models.tokenizer_files import TokenizerFacts
from trainctl.options.data import DataSource
from trainctl.readers.check import UNFIT_IDS, FileProblem
from trainctl.readers.remote import File

INDEXES = (".idx", ".index", ".metadata", ".loss", ".ends", ".origin", ".json", ".gz")
"""Endings of the files that various programs write beside the ids."""


class IdType(Enum):
    """Types of ids in a file without a header or index that says it."""

    uint16 = "uint16"
    uint32 = "uint32"


@dataclass
class TokensConfig(DataFromPaths):
    """Keys of token ids."""

    id_type: IdType | None = option(
        None,
        "Integer type of the token ids in files without an index or header; none requires one "
        "that states it.",
    )
    made_with: str | None = option(
        None,
        "Tokenizer name recorded in the files, if it denotes this run's tokenizer and "
        "tokenizer.path does not show that.",
    )


def without_indexes(files: list[File]) -> list[File]:
    """Return the files of a folder that hold ids."""
    return [file for file in files if file.suffix not in INDEXES]


def problem(
    tokenizer: TokenizerFacts | None, file: File, section: TokensConfig
) -> FileProblem | None:
    """Return a problem of a file's index, or of ids sampled over all of it that the tokenizer does
    not have; None if there is none.
    """
    if not isinstance(file, Path):
        message = f"{file} is not on this machine, and ids are used where they are"
        return FileProblem(UNFIT_IDS, "remote", message, "copy it here")
    try:
        open_decompressed = function_of("data", section.kind)(section, file)
    except TrainctlError as error:
        return FileProblem(UNFIT_IDS, error.hint, error.message, error.hint)
    found = (
        open_decompressed.problems(tokenizer.vocab_size, tokenizer.end_of_document)
        if tokenizer
        else []
    )
    if not found:
        return None
    return FileProblem(UNFIT_IDS, "ids", found[0], "the tokenizer that made them, in tokenizer")


SPEC = DataSource(
    name="tokens",
    keys=TokensConfig,
    build="trainctl.data.tokenized:open_section_file",
    endings=(".bin", ".ds", ".npy"),
    choose=without_indexes,
    problem=problem,
    is_tokenized=True,
    begins_texts=False,
)
