"""A run of a module that is not of transformers: killed, resumed, exported and loaded."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from commands import TINY, live_processes
from own_module import Full, Sizes
from test_kills import module_of

import trainctl as tc

pytestmark = pytest.mark.slow

MODULE = (
    "model=module",
    "model.factory=own_module:full",
    "model.arguments.depth=2",
    "training.steps=40",
    "checkpoint.every_steps=8",
    "zero_stage=3",
)


@pytest.mark.usefixtures("preloaded")
def test_a_kill_changes_no_bit_and_the_module_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parents[1] / "support" / "own_module.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    whole = tc.launch(*TINY, *MODULE, run_dir="whole")
    killed = tc.launch(*TINY, *MODULE, run_dir="killed", wait=False)
    for record in killed.follow():
        if record["event"] == "step" and record["step"] == 10:
            ranks = [
                pid for pid in live_processes(killed.path) if module_of(pid) == "trainctl.train"
            ]
            os.kill(ranks[-1], signal.SIGKILL)
    assert killed.status.state == "failed"
    tc.resume(killed)
    before, after = whole.metrics(), killed.metrics()
    attempts = after["attempt"].tolist()
    kept = attempts.count(1)
    assert attempts == [1] * kept + [2] * (40 - kept) and kept % 8 == 0 and 8 <= kept < 40
    for name in ("loss", "grad_norm", "learning_rate"):
        assert before[name].tolist() == after[name].tolist(), name

    module, tokenizer = tc.load(killed)
    assert type(module).__name__ == "Full" and not module.training
    assert tokenizer.decode(tokenizer.encode("def f")) == "def f"
    whole.checkpoints[-1].export("out")
    exported, _ = tc.load("out")
    assert isinstance(exported, Full) and exported.sizes == Sizes(depth=2)
    theirs, ours = exported.state_dict(), module.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
