from __future__ import annotations

from collections.abc import Iterator

import pytest
from hosts import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Cluster of two hosts and the launcher's; nothing of them is left after the tests."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()
