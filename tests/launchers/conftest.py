from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded_server import PreloadedServer
from supervised import Launches

IMPORTED = (
    "driver",
    "trainctl.launchers.local",
    "trainctl.launchers.agent.__main__",
)


@pytest.fixture(scope="session")
def launch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreloadedServer]:
    """Server that forks launchers, which fork their agents: see `forked_driver`."""
    with PreloadedServer(tmp_path_factory.mktemp("launches"), IMPORTED) as server:
        yield server


@pytest.fixture
def launches(tmp_path: Path, launch_server: PreloadedServer) -> Iterator[Launches]:
    """Makes runs and launches; whatever a test does, none of their processes outlives it."""
    launches = Launches(tmp_path, launch_server)
    yield launches
    launches.close()
