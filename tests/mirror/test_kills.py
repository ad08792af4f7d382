"""A SIGKILL of the launcher, the sender or the store leaves the mirror whole.

`scripts/mirror_kills.py` does it 30 times, also with another implementation of S3.
"""

from __future__ import annotations

import pytest
from mirror_kills import VICTIMS, store_server, trial

pytestmark = pytest.mark.slow


def test_what_is_listed_is_whole_after_a_kill(tmp_path):
    with store_server("moto", tmp_path) as server:
        for number, victim in enumerate(VICTIMS):
            folder = tmp_path / victim
            folder.mkdir()
            trial(server, folder, victim, seed=number)
