"""Where the ranks of one node meet: in a file of the owner's, and at no port."""

from __future__ import annotations

import stat
from pathlib import Path

import psutil
import pytest
from torch.distributed import FileStore

from trainctl.agent.rendezvous import NodeRendezvous
from trainctl.runs.processes import STORE_VARIABLE


def listening() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def test_ranks_of_one_node_meet_where_no_other_user_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set first, so that what the rendezvous sets is taken back: ranks of others would meet there.
    monkeypatch.setenv(STORE_VARIABLE, "")
    monkeypatch.delenv(STORE_VARIABLE)
    before, file = listening(), tmp_path / "a?b#c"
    private = NodeRendezvous("id", 0, 1, None, None, file=file)
    assert listening() == before and not private.use_agent_store
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    private.mark("prepared")
    private.await_mark("prepared", lambda: None)
    FileStore(str(file), 1).set("a", "b")
    public = NodeRendezvous("id", 0, 1, None, None)  # what a program of the user's is told
    assert public.port in listening() - before and public.use_agent_store
