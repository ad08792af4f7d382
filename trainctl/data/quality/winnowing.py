"""Anchors: n-grams chosen so that documents that share a passage share one of them.

Of every `WINDOW` n-grams that follow each other the one with the lowest hash is an anchor
(Schleimer, Wilkerson and Aiken, "Winnowing", 2003). So two documents that share `SHARED` words in a
row share an anchor, wherever the words stand, and those that share fewer than `WORDS` share none.
Some 8 of 100 words have one.
"""

from __future__ import annotations

import numpy as np

from trainctl.data.quality.batches import DocumentBatch
from trainctl.data.quality.hashing import I64, U64

WORDS = 25
"""Words of an n-gram."""
WINDOW = 26
"""N-grams, one of which is an anchor."""
SHARED = WORDS + WINDOW - 1
"""Words of a shared passage that is surely found."""


def anchors(batch: DocumentBatch) -> tuple[U64, I64, I64]:
    """Return the anchors of documents.

    Returns:
        Their hashes, [anchors]; the word of its document that each begins with, ascending within a
        document, [anchors]; and how many each document has, [documents].
    """
    hashes, begin = batch.ngrams(WORDS, short=False)
    document = batch.words.document[begin]
    chosen = np.empty(0, dtype=np.int64)
    if len(hashes) >= WINDOW:
        windows = np.lib.stride_tricks.sliding_window_view(hashes, WINDOW)
        whole = np.flatnonzero(document[: len(windows)] == document[WINDOW - 1 :])
        chosen = whole + windows[whole].argmin(axis=1)
    counts = np.bincount(document, minlength=len(batch))
    short = np.flatnonzero((counts < WINDOW)[document])  # one window, of all that there is
    order = short[np.lexsort((hashes[short], document[short]))]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = document[order[1:]] != document[order[:-1]]
    chosen = np.unique(np.concatenate((chosen, order[first])))
    of_document = np.searchsorted(batch.words.document, np.arange(len(batch)))
    words = begin[chosen] - of_document[document[chosen]]
    return hashes[chosen], words, np.bincount(document[chosen], minlength=len(batch))


def covered(words: I64) -> int:
    """Words in the n-grams that begin with these, which ascend; each counts once."""
    return int(np.minimum(np.diff(words), WORDS).sum()) + WORDS if len(words) else 0
