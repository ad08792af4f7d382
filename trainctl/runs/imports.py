"""Imports of large packages: torch, transformers, DeepSpeed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Import without garbage collection.

    Each collection traverses everything imported so far, none of which is garbage: it took a sixth
    of a rank's start. Later collections skip the imported objects, too (`gc.freeze`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
