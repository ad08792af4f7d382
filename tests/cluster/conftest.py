from __future__ import annotations

from collections.abc import Iterator

import pytest
from hosts import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts and the launcher's; nothing of them is left, whatever the tests do."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()
