"""Convert text to token ids and back: bytes by default, or any `tokenizers` file. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainctl.config.registry import function_of
from trainctl.config.schema import BeginDocuments, DataConfig, TokenizerConfig, TokenizerFromPath
from trainctl.errors import TrainctlError
from trainctl.models.tokenizer_files import read_facts, special_tokens_of
from trainctl.options.data import spec_of as source_spec_of
from trainctl.options.tokenizer import spec_of as tokenizer_spec_of
from trainctl.options.tokenizer.byte import END_OF_DOCUMENT

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Tokenizer(Protocol):
    """Interface of a tokenizer, as corpora and samplers use it."""

    vocab_size: int
    """Exclusive upper bound of the ids."""
    begin_of_text: tuple[int, ...]
    """Ids that the tokenizer puts before a text; often none, or its `bos_token`."""
    begin_of_document: tuple[int, ...]
    """`begin_of_text` if that is the `cls_token`, as an encoder expects; else none."""
    end_of_document: int | None
    """Id appended to each document; None appends nothing."""
    fingerprint: str
    """Hash that changes whenever the same text could be encoded differently."""
    file: Path | None

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return the ids of a text, shape (tokens,)."""

    def encode_sequence(self, text: str, other: str | None = None) -> npt.NDArray[np.int64]:
        """Return the ids of one or two texts with the special tokens of the tokenizer's
        post-processor, as transformers' tokenizers give them to a model.
        """

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of several texts, each as `encode` does, on all cores where that helps."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary; None if there is none."""

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of ids; invalid UTF-8 becomes a replacement character.

        `with_special` keeps special tokens by name; otherwise they are left out.
        """


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the tokenizer that the config names."""
    made: Tokenizer = function_of("tokenizer", config.kind)(config)
    return made


def byte_tokenizer(section: TokenizerConfig) -> Tokenizer:
    """Create the tokenizer of UTF-8 bytes."""
    return ByteTokenizer()


def file_tokenizer(section: TokenizerFromPath) -> Tokenizer:
    """Load the tokenizer file that the kind names."""
    spec = tokenizer_spec_of(section)
    if not section.path:
        raise TrainctlError(
            f"tokenizer.kind={section.kind} needs tokenizer.path",
            hint=f"tokenizer.path=/path/to/{spec.path_is}",
        )
    file = spec.file
    assert file is not None
    return FileTokenizer(file(section))


class ByteTokenizer:
    """Tokenizer with UTF-8 bytes as ids 0 to 255."""

    vocab_size = 257
    begin_of_text: tuple[int, ...] = ()
    begin_of_document: tuple[int, ...] = ()
    end_of_document: int | None = END_OF_DOCUMENT
    fingerprint = "byte-1"
    file: Path | None = None

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        raw = text.encode("utf-8", errors="surrogateescape")
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

    def encode_sequence(self, text: str, other: str | None = None) -> npt.NDArray[np.int64]:
        texts = [text] if other is None else [text, other]
        return np.concatenate([np.append(self.encode(each), END_OF_DOCUMENT) for each in texts])

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [self.encode(text) for text in texts]  # a memory copy: one core is enough

    def id_of(self, token: str) -> int | None:
        return None

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def disable_truncation(backend: Backend) -> bool:
    """Disable truncation and padding of a tokenizer, and return True if either was set."""
    had_limits = backend.truncation is not None or backend.padding is not None
    backend.no_truncation()
    backend.no_padding()
    return had_limits


class FileTokenizer:
    """Tokenizer of a `tokenizer.json` of the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            facts = read_facts(path)
        except TrainctlError as error:
            raise TrainctlError(f"tokenizer.path: {error.message}", hint=error.hint) from None
        text = path.read_text(encoding="utf-8")
        try:
            self._backend = Backend.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise TrainctlError(f"tokenizer.path: {path} is not a tokenizer: {error}") from None
        had_limits = disable_truncation(self._backend)
        self.vocab_size: int = facts.vocab_size
        self.end_of_document: int | None = facts.end_of_document
        cls = self._backend.token_to_id(special_tokens_of(path).get("cls_token", "[CLS]"))
        self.begin_of_text: tuple[int, ...] = facts.begin_of_text
        self.begin_of_document: tuple[int, ...] = ()
        if facts.begin_of_text == (cls,):
            self.begin_of_document = facts.begin_of_text
        end = f"\0{facts.end_of_document}"  # it is part of every encoded text
        end += "".join(f"\0begin {each}" for each in self.begin_of_document)
        self.file: Path | None = path
        whole = "\0whole" if had_limits else ""
        self.fingerprint = hashlib.sha256((text + end + whole).encode()).hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_sequence(self, text: str, other: str | None = None) -> npt.NDArray[np.int64]:
        return np.asarray(self._backend.encode(text, other).ids, dtype=np.int64)

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        # Runs on the library's threads, one per core (RAYON_NUM_THREADS), without offsets.
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(each.ids, dtype=np.int64) for each in found]

    def id_of(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens, special ones included, by their text."""
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    def added_tokens(self) -> dict[int, str]:
        """Return the names of the tokens beside the vocabulary, special or not, by their ids."""
        found = self._backend.get_added_tokens_decoder()
        return {number: token.content for number, token in found.items()}

    def decode(self, ids: Sequence[int], *, with_special: bool = False) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=not with_special))


BATCH_CHARACTERS = 4 << 20
"""Characters tokenized together: enough work for every core, in little memory."""

T = TypeVar("T")


class Encoder(Protocol):
    """The part of a tokenizer that a store needs; see `trainctl.data.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def begin_of_document(self) -> tuple[int, ...]: ...

    @property
    def end_of_document(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each text."""


@dataclass(frozen=True, slots=True)
class DocumentEncoder:
    """A tokenizer with other ids before each document, or a separator text after it."""

    encoder: Encoder
    begin_of_document: tuple[int, ...]
    separator: str
    """Separator text, encoded together with the document before it."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the encoder."""
        return self.encoder.vocab_size

    @property
    def end_of_document(self) -> int | None:
        """End-of-document id of the encoder; it follows the separator."""
        return self.encoder.end_of_document

    @property
    def fingerprint(self) -> str:
        """Fingerprint of encoder, separator and the ids before a document."""
        found = self.encoder.fingerprint
        if self.begin_of_document != self.encoder.begin_of_document:
            found += f" begin {self.begin_of_document}"
        return f"{found} {json.dumps(self.separator)}" if self.separator else found

    def encode_all(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each text with the separator after it."""
        return self.encoder.encode_all([text + self.separator for text in texts])


def begin_of_documents(section: DataConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that a source puts before each text that it tokenizes as a document."""
    if section.begin_documents is BeginDocuments.tokenizer:
        return tokenizer.begin_of_text
    return tokenizer.begin_of_document if section.begin_documents is BeginDocuments.cls else ()


def encode_prompt(section: DataConfig, tokenizer: Tokenizer, text: str) -> npt.NDArray[np.int64]:
    """Return the ids of a prompt that is a text, with what the source puts before it.

    A text that begins with these tokens by itself does not get them twice.
    """
    ids = tokenizer.encode(text)
    begin = tokenizer.begin_of_text
    has_begin = section.begin_documents is BeginDocuments.tokenizer and begin
    if not has_begin or tuple(ids[: len(begin)].tolist()) == begin:
        return ids
    return np.insert(ids, 0, begin)


def encoder_of(section: DataConfig, tokenizer: Tokenizer) -> Encoder:
    """Return the encoder of a source's documents.

    Raises:
        TrainctlError: The tokenizer lacks something that the source needs.
    """
    if stores_loss_mask(section):
        made: Encoder = function_of("data", section.kind, "encoder")(section, tokenizer)
        return made
    begin = begin_of_documents(section, tokenizer)
    if begin == tokenizer.begin_of_document and not section.separator:
        return tokenizer
    return DocumentEncoder(tokenizer, begin, section.separator)


def stores_loss_mask(section: DataConfig) -> bool:
    """Return True if a source's ids carry loss marks (`data.token_arrays`)."""
    return section.factory is None and bool(source_spec_of(section).encoder)


def dtype_for(vocab_size: int) -> str:
    """Return the smallest numpy dtype for stored ids, little endian."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def encode_documents(
    texts: Iterable[tuple[T, str]], tokenizer: Encoder
) -> Iterator[tuple[T, str, npt.NDArray[np.int64]]]:
    """Yield each item with its text and ids, in order. The ids include those that begin and end a
    document.

    Texts are encoded `BATCH_CHARACTERS` characters at a time; a longer text is encoded alone.
    """
    begin, end = tokenizer.begin_of_document, tokenizer.end_of_document
    for together in _text_batches(texts):
        ids_of_each = tokenizer.encode_all([text for _, text in together])
        for (what, text), ids in zip(together, ids_of_each, strict=True):
            ids = np.insert(ids, 0, begin) if begin else ids
            yield what, text, ids if end is None else np.append(ids, end)


def _text_batches(texts: Iterable[tuple[T, str]]) -> Iterator[list[tuple[T, str]]]:
    group: list[tuple[T, str]] = []
    size = 0
    for what, text in texts:
        group.append((what, text))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group
