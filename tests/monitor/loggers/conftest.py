from __future__ import annotations

from collections.abc import Iterator

import processes
import pytest
from preloaded_server import PreloadedServer


@pytest.fixture(scope="session", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with PreloadedServer(tmp_path_factory.mktemp("loggers"), processes.IMPORTED) as server:
        processes.servers.append(server)
        yield
        processes.servers.remove(server)
