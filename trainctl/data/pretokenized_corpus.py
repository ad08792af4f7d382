"""A corpus of files that other tools tokenized: the ids are used in place. No torch.

Only the document ends and a record are written: a few bytes a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.config.registry import function_of
from trainctl.config.schema import DataConfig
from trainctl.data.corpus_writer import Chunk
from trainctl.data.store import files_in_order
from trainctl.data.token_arrays import Span, probe_starts, token_fingerprint
from trainctl.data.tokenized import Ends, Tokenized, ends_by_id
from trainctl.data.tokenizer import Tokenizer
from trainctl.errors import Finding, TrainctlError
from trainctl.readers.check import UNFIT_IDS
from trainctl.readers.files import TextFiles
from trainctl.readers.remote import File

_COUNTED = 256
"""Number of places of a span whose ids are counted, for the unigram entropy."""
_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class _DocumentRange:
    first: int
    end: int
    """Position in the file, one past the last token."""
    ends: Ends
    """Document ends, counted from `first`."""
    number: int
    """Number of the first document in the file, from 1."""


def open_token_files(
    config: DataConfig, vocab_size: int, end_of_document: int | None, files: Sequence[File]
) -> tuple[list[Tokenized], list[Finding]]:
    """Open files of ids and return them with all problems found.

    `vocab_size` and `end_of_document` are the tokenizer's.
    """
    opened, found = [], []
    open_file = function_of("data", config.kind)
    for file in files:
        try:
            if not isinstance(file, Path):
                raise TrainctlError(
                    f"{file} is not on this machine, and ids are used where they are",
                    hint="copy it here",
                )
            opened.append(open_file(config, file))
        except TrainctlError as error:
            found.append(_unfit_ids_finding(error.message, error.hint))
            continue
        found += [
            _unfit_ids_finding(each, "the tokenizer that made them, in tokenizer")
            for each in opened[-1].problems(vocab_size, end_of_document)
        ]
    return opened, found


def chunks_in_place(config: DataConfig, tokenizer: Tokenizer, files: TextFiles) -> Iterator[Chunk]:
    """Yield the two splits of a corpus, each in the order of its files.

    Of each file the last documents are held out, or of its only document the end, because spans
    in place are contiguous; unless whole files are held out.

    Raises:
        TrainctlError: With all problems of the files.
    """
    every = files_in_order(files.train, files.held_out)
    opened, found = open_token_files(config, tokenizer.vocab_size, tokenizer.end_of_document, every)
    found += _find_other_tokenizers(config, tokenizer, opened)
    if found:
        more = f" (and {len(found) - 1:,} more problems)" if len(found) > 1 else ""
        raise TrainctlError(found[0].message + more, hint=found[0].hint, findings=found)
    held_out = set(files.held_out)
    for number, (file, tokenized) in enumerate(zip(every, opened, strict=True)):
        ends = _document_ends(tokenized, tokenizer.end_of_document)
        if files.by_document:
            for split, part in zip(
                ("train", "held_out"), _split_file(ends, config.held_out_fraction), strict=True
            ):
                if part.end > part.first:
                    yield _token_chunk(split, tokenized, part, number, tokenizer.vocab_size)
        else:
            whole = _DocumentRange(0, len(tokenized.ids), ends, 1)
            split = "held_out" if file in held_out else "train"
            yield _token_chunk(split, tokenized, whole, number, tokenizer.vocab_size)


def _document_ends(tokenized: Tokenized, end_of_document: int | None) -> Ends:
    """Return ends from the index, or by the end-of-document id; else all is one document."""
    if tokenized.ends is not None:
        return tokenized.ends
    if end_of_document is None:
        return np.array([len(tokenized.ids)], dtype=np.int64)
    return ends_by_id(tokenized.ids, end_of_document)


def _split_file(ends: Ends, fraction: float) -> tuple[_DocumentRange, _DocumentRange]:
    """Divide a file into training documents and held-out documents, its last ones."""
    total = int(ends[-1])
    kept = round(total * (1 - fraction))
    if len(ends) == 1:
        return (
            _DocumentRange(0, kept, np.array([kept]), 1),
            _DocumentRange(kept, total, np.array([total - kept]), 1),
        )
    count = int(np.clip(np.searchsorted(ends, kept, side="right"), 1, len(ends) - 1))
    at = int(ends[count - 1])
    return _DocumentRange(0, at, ends[:count], 1), _DocumentRange(
        at, total, ends[count:] - at, count + 1
    )


def _token_chunk(
    split: str, tokenized: Tokenized, part: _DocumentRange, file: int, limit: int
) -> Chunk:
    ids = tokenized.ids[part.first : part.end]
    span = Span(
        file=str(tokenized.file),
        dtype=ids.dtype.str,
        offset=tokenized.offset,
        first=part.first,
        tokens=len(ids),
        size=tokenized.file.stat().st_size,
        limit=limit,
    )
    count = len(part.ends)
    return Chunk(
        split,
        _id_sample(ids, limit),
        part.ends,
        np.full(count, file),
        np.arange(part.number, part.number + count),
        replace(span, fingerprint=token_fingerprint(ids)),
    )


def _id_sample(ids: npt.NDArray[np.integer], limit: int) -> npt.NDArray[np.integer]:
    """Return ids from places all over a span, as a sample for the unigram entropy.

    Ids outside the vocabulary are left out here; they are reported when they are read.
    """
    parts = [ids[at : at + _AT_ONCE] for at in probe_starts(len(ids), _COUNTED, _AT_ONCE)]
    found = np.concatenate(parts) if parts else ids
    return found[(found >= 0) & (found < limit)]


def _find_other_tokenizers(
    config: DataConfig, tokenizer: Tokenizer, opened: Sequence[Tokenized]
) -> Iterator[Finding]:
    file = tokenizer.file
    own = set(file.absolute().parts) if file else set()
    stated = getattr(config, "made_with", None)
    for name in sorted({each.tokenizer for each in opened if each.tokenizer} - {stated}):
        if name.rpartition("/")[2] in own or (file is not None and _is_copy(name, file)):
            continue
        first = next(each.file for each in opened if each.tokenizer == name)
        yield _unfit_ids_finding(
            f"{first} was made with the tokenizer {name!r}, and this run has "
            f"{file or 'that of bytes'}",
            f"that tokenizer in tokenizer, or data.made_with={name} if it is the same",
        )


def _is_copy(name: str, file: Path) -> bool:
    """Return True if `name` is the path of a file with the same bytes."""
    try:
        # The name is foreign data: it may be a device, which would be read without end.
        return Path(name).is_file() and Path(name).read_bytes() == file.read_bytes()
    except (OSError, ValueError):
        return False


def _unfit_ids_finding(message: str, hint: str) -> Finding:
    return Finding(rule=UNFIT_IDS, key="data.paths", message=message, hint=hint)
