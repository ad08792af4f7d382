from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import Launches


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    """Makes runs and launches; whatever a test does, none of their processes outlives it."""
    launches = Launches(tmp_path)
    yield launches
    launches.close()
