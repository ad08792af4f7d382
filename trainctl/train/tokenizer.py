"""Text to token ids and back: bytes by default, or any `tokenizers` file. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import TokenizerConfig, TokenizerKind
from trainctl.errors import TrainctlError

BYTE_END_OF_DOCUMENT = 256
"""The byte tokenizer's one id that is not a byte."""

# Names that published tokenizers give to their end-of-document token, most specific first.
_END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """What the corpus and the sampler need of a tokenizer.

    Attributes:
        vocab_size: Ids are below it.
        end_of_document: Id put after each document; None puts nothing.
        fingerprint: Changes whenever the same text could give other ids.
        is_byte_level: Whether ids below 256 are the text's own bytes.
    """

    vocab_size: int
    end_of_document: int | None
    fingerprint: str
    is_byte_level: bool

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of a text, shape (tokens,)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; what is not text becomes a replacement character."""


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the config names.

    Raises:
        TrainctlError: Its file is missing or is none.
    """
    if config.kind is TokenizerKind.byte:
        return ByteTokenizer()
    path = Path(config.path or "").expanduser()
    return FileTokenizer(path / "tokenizer.json" if config.kind is TokenizerKind.hf else path)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255."""

    vocab_size = 257
    end_of_document: int | None = BYTE_END_OF_DOCUMENT
    fingerprint = "byte-1"
    is_byte_level = True

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        raw = text.encode("utf-8", errors="surrogateescape")
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library."""

    is_byte_level = False

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            text = path.read_text()
            self._backend = Backend.from_str(text)
        except OSError as error:
            raise TrainctlError(
                f"tokenizer.path: cannot read {path}: {error.strerror}",
                hint="give a tokenizers JSON file, or a transformers directory with tokenizer.json",
            ) from None
        except Exception as error:  # the library raises plain Exception
            raise TrainctlError(f"tokenizer.path: {path} is not a tokenizer: {error}") from None
        self.vocab_size: int = self._backend.get_vocab_size()
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.end_of_document: int | None = self._end_of_document(path)

    def _end_of_document(self, path: Path) -> int | None:
        names: tuple[str, ...] = _END_NAMES
        settings = path.with_name("tokenizer_config.json")
        if settings.is_file():
            token = json.loads(settings.read_text()).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            names = (token, *names) if isinstance(token, str) else names
        ids = (self._backend.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids)))
