"""What NCCL's flight recorder tells of collectives under way, on the one rank of one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from trainctl.engines.flight_recorder import write_record

folder = Path(sys.argv[1])
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
dist.all_reduce(torch.ones(4, 3, device="cuda"))
torch.cuda.synchronize()
torch.cuda._sleep(10_000_000_000)
dist.broadcast(torch.ones(5, device="cuda", dtype=torch.bfloat16), 0, async_op=True)
time.sleep(2)
write_record(folder / "waiting.json", [])
torch.cuda.synchronize()
time.sleep(2)
write_record(folder / "done.json", [])
dist.destroy_process_group()
"""


@pytest.mark.gpu
def test_collectives_are_listed_and_those_under_way_are_not_done(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], check=True, timeout=120)
    waiting, done = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("waiting", "done")
    )
    assert [group["ranks"] for group in waiting["groups"].values()] == [[0]]
    shown = [
        (call["operation"], call["types"], call["sizes"], call["is_done"])
        for call in waiting["calls"]
    ]
    assert shown == [
        ("all_reduce", ["float32"], [[4, 3]], True),
        ("broadcast", ["bfloat16"], [[5]], False),
    ]
    assert [call["is_done"] for call in done["calls"]] == [True, True]
