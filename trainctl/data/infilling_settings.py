"""Fill-in-the-middle settings of a run's sources: sentinel ids, and the random key of a source."""

from __future__ import annotations

import hashlib

import numpy as np

from trainctl.config.schema import RunConfig
from trainctl.data.infilling import Infilling
from trainctl.data.permutation import key_of, mix
from trainctl.data.tokenizer import Tokenizer, load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.plan.mixture import sources_of


def infilling_of(config: RunConfig, name: str) -> Infilling | None:
    """Return the fill-in-the-middle settings of a source; None if it does not use it.

    Raises:
        TrainctlError: The tokenizer lacks a sentinel token.
    """
    section = sources_of(config.data)[name]
    if not section.fim_rate:
        return None
    tokenizer = load_tokenizer(config.tokenizer)
    key = "data" if not config.data.sources else f"data.sources.{name}"
    prefix, middle, suffix = (
        _id_of(tokenizer, token, f"{key}.fim_tokens") for token in section.fim_tokens
    )
    digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
    of_seed = mix(np.uint64(config.training.seed))
    return Infilling(
        key=key_of(of_seed, int.from_bytes(digest[:7], "little")),
        rate=section.fim_rate,
        spm_rate=section.fim_spm_rate,
        prefix=prefix,
        middle=middle,
        suffix=suffix,
        end_of_document=tokenizer.end_of_document,
    )


def _id_of(tokenizer: Tokenizer, token: str, key: str) -> int:
    found = tokenizer.id_of(token)
    if found is None:
        raise TrainctlError(
            f"{key}: the tokenizer {tokenizer.file or 'of bytes'} has no token {token!r}",
            hint=f"the names that it has for prefix, middle and suffix, in this order, in {key}",
        )
    return found
