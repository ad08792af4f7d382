"""A run whose directory is gone goes on from its mirror, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bucket import s3_server
from commands import TINY, trainctl
from mirrors import check_whole

import trainctl as tc
from trainctl import api
from trainctl.launchers.processes import send_rest
from trainctl.runs.attempts import config_of
from trainctl.runs.mirror_state import MIRROR

pytestmark = pytest.mark.slow

URL = "s3://corpus/runs/mirrored"
CONFIG = ("training.steps=12", "checkpoint.every_steps=2", "checkpoint.keep=2")


@pytest.mark.usefixtures("preloaded")
def test_a_run_whose_directory_is_gone_goes_on_from_its_mirror(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = tc.launch(*TINY, *CONFIG, run_dir="whole")
    with s3_server():
        mirrored = (f"checkpoint.mirror={URL}", "training.stop_after_steps=8")
        gone = tc.launch(*TINY, *CONFIG, *mirrored, run_dir="gone")
        assert send_rest(gone.paths, MIRROR, config_of(gone.paths)) == 0
        found = gone.status.mirror
        assert (found["step"], found["waiting"], found["problem"]) == (8, [], "")
        shutil.rmtree(gone.path)
        assert [row["step"] for row in api.list_checkpoints(URL)] == [6, 8]
        assert [row["problems"] for row in api.verify_checkpoints(URL)] == [[], []]
        told = trainctl("resume", URL, cwd=tmp_path)
        assert f"fetched {URL} to {tmp_path / 'runs' / 'gone'}" in told
        fresh = tc.Run("runs/gone")
        before, after = whole.metrics(), fresh.metrics()
        assert after["attempt"].tolist() == [1] * 8 + [2] * 4
        for name in ("loss", "grad_norm", "learning_rate"):
            assert before[name].tolist() == after[name].tolist(), name
        assert send_rest(fresh.paths, MIRROR, config_of(fresh.paths)) == 0
        assert check_whole(URL) == ["step-00000010", "step-00000012"]
        trainctl("export", URL, "out", cwd=tmp_path)
        whole.checkpoint().export("expected")
        weights = [Path(name, "model.safetensors").read_bytes() for name in ("out", "expected")]
        assert weights[0] == weights[1]
