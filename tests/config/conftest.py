"""Fixtures for tests of transformers directories."""

from __future__ import annotations

import pytest
from anatomies import SMALL


@pytest.fixture
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the trace of the model by a fixed anatomy; `tests/memory/test_trace.py` traces."""
    monkeypatch.setattr("trainctl.config.compose.anatomy_in_child", lambda config: SMALL)
