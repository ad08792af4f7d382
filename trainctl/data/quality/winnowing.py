"""Anchors: n-grams chosen so that documents with a common passage have a common anchor.

Of every `WINDOW` consecutive n-grams the one with the lowest hash is an anchor (Schleimer,
Wilkerson and Aiken, "Winnowing", 2003). So two documents that share `SHARED` consecutive words
share an anchor, wherever the words are, and documents that share fewer than `WORDS` share none.
About 8 of 100 words have an anchor.
"""

from __future__ import annotations

import numpy as np

from trainctl.data.quality.batches import DocumentBatch
from trainctl.data.quality.hashing import I64, U64

WORDS = 25
"""Words per n-gram."""
WINDOW = 26
"""Number of consecutive n-grams, one of which is an anchor."""
SHARED = WORDS + WINDOW - 1
"""Words of a shared passage that is always found."""


def anchors(batch: DocumentBatch) -> tuple[U64, I64, I64]:
    """Return the anchors of documents.

    Returns:
        Hashes of the anchors, [anchors]; the word of the document at which each begins, ascending
        within a document, [anchors]; and their number in each document, [documents].
    """
    hashes, begin = batch.ngrams(WORDS, short=False)
    document = batch.words.document[begin]
    chosen = np.empty(0, dtype=np.int64)
    if len(hashes) >= WINDOW:
        windows = np.lib.stride_tricks.sliding_window_view(hashes, WINDOW)
        whole = np.flatnonzero(document[: len(windows)] == document[WINDOW - 1 :])
        chosen = whole + windows[whole].argmin(axis=1)
    counts = np.bincount(document, minlength=len(batch))
    short = np.flatnonzero((counts < WINDOW)[document])  # a document of one incomplete window
    order = short[np.lexsort((hashes[short], document[short]))]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = document[order[1:]] != document[order[:-1]]
    chosen = np.unique(np.concatenate((chosen, order[first])))
    of_document = np.searchsorted(batch.words.document, np.arange(len(batch)))
    words = begin[chosen] - of_document[document[chosen]]
    return hashes[chosen], words, np.bincount(document[chosen], minlength=len(batch))


def covered(words: I64) -> int:
    """Count the words in the n-grams that begin at `words` (ascending), each once."""
    return int(np.minimum(np.diff(words), WORDS).sum()) + WORDS if len(words) else 0
