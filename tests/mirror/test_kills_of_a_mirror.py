"""A SIGKILL of the launcher, the sender or the store leaves the mirror whole.

`scripts/mirror_kills.py` does it 30 times, also with another implementation of S3.
"""

from __future__ import annotations

import pytest
from mirror_kills import VICTIMS, store_server, trial

pytestmark = pytest.mark.slow


def test_what_is_listed_is_whole_after_each_kill(tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    with store_server("moto", tmp_path) as server:
        trial(server, folder, VICTIMS, seed=0)
