"""What the tests of transformers directories share."""

from __future__ import annotations

import pytest


@pytest.fixture
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `config.json` alone says; tests/memory/test_trace.py traces."""
    monkeypatch.setattr("trainctl.config.compose.trace_in_child", lambda config: {"tensors": []})
