"""Tests of a single node's rendezvous, which uses a file of the owner's and no port."""

from __future__ import annotations

import stat
from pathlib import Path

import psutil
import pytest
from torch.distributed import FileStore, PrefixStore, TCPStore

from trainctl.launchers.agent import rendezvous
from trainctl.launchers.agent.rendezvous import JoinWatch, NodeRendezvous


def listening() -> set[int]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def test_ranks_of_one_node_meet_where_no_other_user_can(tmp_path: Path) -> None:
    before, file = listening(), tmp_path / "a?b#c"
    private = NodeRendezvous("id", 0, 1, None, None, file=file)
    assert listening() == before and private.port == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    private.mark("prepared")  # for nobody
    private.wait_for_other_nodes(lambda: None)
    FileStore(str(file), 1).set("a", "b")
    public = NodeRendezvous("id", 0, 1, None, None)  # what a program of the user's is told
    assert public.port in listening() - before


@pytest.mark.parametrize("joins", [True, False])
def test_ranks_that_join_no_process_group_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """Two models that know nothing of each other would train, and end with 0."""
    meeting = NodeRendezvous("r", 0, 1, None, None)
    told: list[float] = []
    joining = JoinWatch(meeting, told.append)
    joining.look()  # it is too early to tell
    if joins:
        PrefixStore("default_pg", TCPStore(meeting.address, meeting.port)).set("rank0", "here")
    assert told == []
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.0)
    joining.look()
    joining.look(at_end=True)
    assert len(told) == (0 if joins else 1)
