"""Masked tokens (Devlin et al. 2019, arXiv:1810.04805): some tokens are hidden, and predicted.

Whether and how a token is hidden is a function of (seed, source, epoch, sample, position) alone. So
it is the same in every layout and after every resume, and another in the next epoch. Held-out
samples have the same hidden tokens in every evaluation and with every seed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import RunConfig
from trainctl.data.permutation import Words, derive_key, splitmix64, unit_interval
from trainctl.data.tokenizer import begin_of_documents, load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.options.objective.masked import MaskedConfig
from trainctl.options.tokenizer import tokenizer_facts
from trainctl.plans.mixture import sources_of

_CHOICE, _KIND, _TOKEN = range(3)
"""Random numbers per position: whether it is hidden, by what, and by which random token."""


@dataclass(frozen=True, slots=True)
class TokenMasking:
    """Settings that hide tokens of a source's samples."""

    key: Words
    """Random key of the source, which depends on the seed."""
    rate: float
    mask_share: float
    random_share: float
    mask_token: int
    """Id that replaces hidden tokens."""
    kept_token: int | None
    """Id that is never hidden: it begins documents."""
    vocab_size: int
    """Exclusive upper bound of the ids that replace hidden tokens at random."""

    def apply(
        self,
        tokens: npt.NDArray[np.int64],
        can_hide: npt.NDArray[np.bool_],
        indices: npt.NDArray[np.int64],
        epochs: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Hide tokens in place, and return where, (samples, length).

        Args:
            tokens: Ids, (samples, length).
            can_hide: Whether a token may be hidden, (samples, length).
            indices: Index of each sample in its split.
            epochs: Epoch of each sample.
        """
        samples = derive_key(self.key, epochs, indices)[:, None]
        numbers = derive_key(samples, np.arange(tokens.shape[1])[None])
        if self.kept_token is not None:
            can_hide = can_hide & (tokens != self.kept_token)
        is_hidden = can_hide & (unit_interval(derive_key(numbers, _CHOICE)) < self.rate)
        kind = unit_interval(derive_key(numbers, _KIND))
        drawn = derive_key(numbers, _TOKEN) % np.uint64(self.vocab_size)
        is_random = is_hidden & (kind >= self.mask_share)
        is_random &= kind < self.mask_share + self.random_share
        tokens[is_hidden & (kind < self.mask_share)] = self.mask_token
        tokens[is_random] = drawn[is_random].astype(np.int64)
        return is_hidden


def token_masking(config: RunConfig, name: str, *, held_out: bool = False) -> TokenMasking | None:
    """Return the masking of a source's samples; None if the objective hides no tokens.

    Raises:
        TrainctlError: The tokenizer has no mask token.
    """
    section = config.objective
    if not isinstance(section, MaskedConfig):
        return None
    facts, mask = tokenizer_facts(config.tokenizer), section.mask_token
    source = sources_of(config.data).get(name, config.data)
    tokenizer = load_tokenizer(config.tokenizer)
    found = facts.mask_token if mask is None else tokenizer.id_of(mask)
    if found is None:
        raise TrainctlError(
            f"objective.mask_token={mask or 'null'}: the tokenizer has no such token",
            hint="the text of one of its tokens in objective.mask_token",
        )
    seed = f"{'held out' if held_out else config.training.seed}/{name}"
    digest = hashlib.sha256(seed.encode("utf-8", errors="surrogateescape")).digest()
    return TokenMasking(
        key=splitmix64(np.uint64(int.from_bytes(digest[:8], "little"))),
        rate=section.rate,
        mask_share=section.mask_share,
        random_share=section.random_share,
        mask_token=found,
        kept_token=next(iter(begin_of_documents(source, tokenizer)), None),
        vocab_size=facts.vocab_size,
    )
