"""Importing what is large: torch, transformers, DeepSpeed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without looking for garbage.

    Each collection looks at all that has been imported so far, and what is imported stays: it was a
    sixth of a rank's start. Later collections leave it out, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
