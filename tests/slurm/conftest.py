from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Slurm cluster of two nodes for all tests; skips without Slurm or root."""
    lacking = missing()
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)} (Debian: apt-get install slurm-wlm munge)")
    with tempfile.TemporaryDirectory(prefix="trainctl-slurm-", dir="/tmp") as folder:
        with Cluster(Path(folder)) as cluster:
            yield cluster
