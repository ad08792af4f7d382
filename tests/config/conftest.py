"""What the tests of transformers directories share."""

from __future__ import annotations

import pytest
from anatomies import SMALL


@pytest.fixture
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `config.json` alone says; tests/memory/test_trace.py traces."""
    monkeypatch.setattr("trainctl.config.compose.anatomy_in_child", lambda config: SMALL)
