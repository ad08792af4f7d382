"""Fixture of the tests that start scripts of the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from preloaded_server import PreloadedServer

HOOK = Path(__file__).parents[1] / "support" / "preloaded_scripts"


@pytest.fixture
def scripts_preloaded(preloaded_server: PreloadedServer) -> dict[str, str]:
    """Variables of a launch whose processes are preloaded, the ranks of a script included."""
    given = preloaded_server.environment
    path = os.pathsep.join([str(HOOK), given["PYTHONPATH"]])
    return {**given, "PYTHONPATH": path}
