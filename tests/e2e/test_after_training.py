"""Tests of commands on a run's checkpoints: evaluate, sample, export, and save one now."""

import json
import signal
import time

import pytest
import torch
from commands import TINY, events, finish, start, trainctl
from transformers import AutoModelForCausalLM

from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded")]


def as_json(*arguments, cwd):
    code, out, err = finish(start(*arguments, "--json", cwd=cwd))
    assert code == 0, err
    return json.loads(out)


def test_evaluate_sample_and_export_repeat_what_the_run_recorded(tmp_path):
    run = tmp_path / "run"
    trainctl(
        "launch", *TINY, "training.steps=4", "training.evaluate_every_steps=2",
        "checkpoint.every_steps=2", "training.sample_tokens=12", "zero_stage=3",
        "checkpoint.weights_only_every_steps=3",
        "training.ema_decay=0.2",
        "--run-dir", "run",
        cwd=tmp_path,
    )  # fmt: skip
    early, late = events(run, "evaluation")

    found = as_json("evaluate", "run", cwd=tmp_path)
    assert found["checkpoint"] == "step-00000004" and found["samples"] == 4
    assert abs(found["loss"] - late["loss"]) < 1e-6
    assert found["unigram_entropy"] == late["unigram_entropy"]
    found = as_json("evaluate", "run", "--step", "2", "--weights", "ema", cwd=tmp_path)
    assert found["weights"] == "ema" and early["ema_loss"] != early["loss"]
    assert abs(found["loss"] - early["ema_loss"]) < 1e-6
    (sample,) = events(run, "sample")
    again = as_json("sample", "run", "def ", "--tokens", "12", cwd=tmp_path)
    assert again["text"] == sample["text"] and again["seed"] == 1234
    said = trainctl("sample", "run", "--tokens", "3", "--seed", "5", "--", "--x=1", cwd=tmp_path)
    assert "--x=1" in said

    found = as_json("evaluate", "run", "--step", "3", "--samples", "9", cwd=tmp_path)
    assert found["checkpoint"] == "weights-00000003" and found["samples"] == 9
    assert abs(found["loss"] - late["loss"]) < 0.5
    rows = as_json("checkpoint", "ls", "run", cwd=tmp_path)["checkpoints"]
    assert [(row["step"], row["weights_only"]) for row in rows] == [
        (2, False),
        (3, True),
        (4, False),
    ]
    assert rows[1]["bytes"] < rows[2]["bytes"] / 2.5  # of AdamW's three tensors one

    # A damaged newest one is not used: the one before it is, and that is said.
    damaged = run / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    said = trainctl("export", "run", "exported", "--dtype", "bf16", "--check", cwd=tmp_path)
    assert "passed over: step-00000004: rank-00000.safetensors is damaged" in said
    assert "exported weights-00000003" in said and "byte tokenizer has none" in said
    assert "by transformers" in said and "answers end at 256" in said and "\nequal" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.dtype == torch.bfloat16
    said = trainctl("export", "run", "exported", cwd=tmp_path, code=2)
    assert "not an empty folder" in said
    of_gguf = ("--to", "gguf", "--dtype", "q8_0", "--check")
    found = as_json("export", "run", "run.gguf", *of_gguf, cwd=tmp_path)
    assert found["check"]["equal"] and found["check"]["library"].startswith("llama.cpp")
    assert found["check"]["difference"] <= found["check"]["bound"] and found["dtype"] == "q8_0"
    said = trainctl("export", "run", "run.gguf", *of_gguf, cwd=tmp_path, code=2)
    assert "run.gguf exists" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run", "run.gguf"]


def test_checkpoint_now_saves_while_the_run_trains(tmp_path):
    run = tmp_path / "run"
    launch = start("launch", *TINY, "training.steps=100000", "--run-dir", "run", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (run / "events.jsonl").is_file() or not events(run, "step"):
            assert time.monotonic() < deadline and launch.poll() is None
            time.sleep(0.1)
        saved = as_json("checkpoint", "now", "run", cwd=tmp_path)
        (info,) = list_checkpoints(RunPaths(run))
        assert info.step == saved["step"] and str(info.path) == saved["path"]
        assert "intact" in trainctl("checkpoint", "verify", "run", cwd=tmp_path)
        last = events(run, "step")[-1]["step"]
        while events(run, "step")[-1]["step"] < last + 3:  # it goes on
            assert time.monotonic() < deadline and launch.poll() is None
            time.sleep(0.1)
        assert "in use" in trainctl("checkpoint", "rm", "run", str(info.step), cwd=tmp_path, code=5)
    finally:
        launch.send_signal(signal.SIGTERM)
        finish(launch)
    assert "is not training" in trainctl("checkpoint", "now", "run", cwd=tmp_path, code=5)
