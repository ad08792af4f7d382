"""Scripts of the kinds that are public, unchanged: started, stopped, and started again."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from chat_files import write_tokenizer
from commands import events, finish, live_processes, start, trainctl

from trainctl.runs.layout import RunPaths

SUPPORT = Path(__file__).parents[1] / "support"
ACCELERATE = SUPPORT.parents[1] / "docs" / "examples" / "accelerate_script.py"
CIFAR = SUPPORT / "cifar_script.py"


def logs(run: Path, attempt: int) -> list[str]:
    return [RunPaths(run).attempt(attempt).rank_log(rank).read_text() for rank in (0, 1)]


def stop_once(launched, run: Path, there: Path) -> None:
    """Send SIGTERM to the launch as soon as a file of the script's is there."""
    deadline = time.monotonic() + 240
    try:
        while not there.exists():
            assert time.monotonic() < deadline and launched.poll() is None, logs(run, 1)
            time.sleep(0.1)
        launched.send_signal(signal.SIGTERM)
    finally:
        code, out, err = finish(launched)
    assert code == 143, out + err
    assert not live_processes(run)
    assert not events(run, "not_joined")


def weights(log: str) -> dict[int, float]:
    """Return the sum of weights after each step, as the accelerate script prints it."""
    found = re.findall(r"step (\d+) of 2 ranks: .* weights (\S+)", log)
    return {int(step): float(weight) for step, weight in found}


@pytest.mark.slow
def test_a_script_with_an_accelerator_trains_one_model(
    tmp_path: Path, scripts_preloaded: dict[str, str]
) -> None:
    """Ranks on CPUs use DDP, as under accelerate's own launcher.

    The first attempt's processes start and end as a user's do; those of all others are preloaded.
    """
    run, out = tmp_path / "run", tmp_path / "out"
    first = start(
        "launch", f"script={ACCELERATE}", "script_config_flag=null", "recipe=tiny",
        "--run-dir", str(run), "--", "--output_dir", str(out), cwd=tmp_path,
    )  # fmt: skip
    stop_once(first, run, out / "done")
    one, other = logs(run, 1)
    assert "MULTI_CPU: 2 processes" in one and "MULTI_CPU: 2 processes" in other
    together = weights(one).keys() & weights(other).keys()
    assert len(together) >= 4
    assert all(weights(one)[step] == weights(other)[step] for step in together)

    step = int((out / "checkpoint" / "step").read_text())
    words = ["--output_dir", str(out), "--resume_from_checkpoint", str(out / "checkpoint")]
    more = ("--steps", str(step + 3))
    trainctl("resume", str(run), "--", *words, *more, cwd=tmp_path, **scripts_preloaded)
    again = logs(run, 2)
    assert f"resumed at step {step}" in again[0]
    assert set(weights(again[0])) == {step + 1, step + 2, step + 3}
    known = weights(one).keys() & weights(again[0]).keys()
    assert all(weights(one)[each] == weights(again[0])[each] for each in known)


@pytest.mark.slow
def test_an_accelerator_trains_with_the_json_of_the_plan(
    tmp_path: Path, scripts_preloaded: dict[str, str]
) -> None:
    """This is the path of GPUs, whose variables `test_program.py` compares with accelerate's. On a
    CPU the script has to name the backend, otherwise accelerate takes each rank for the only one.
    """
    run = tmp_path / "run"
    file = RunPaths(run).attempt(1).accelerate
    variables = {"USE_CPU": "false", "USE_DEEPSPEED": "true", "DEEPSPEED_CONFIG_FILE": str(file)}
    trainctl(
        "launch", f"script={ACCELERATE}", "script_config_flag=null", "recipe=tiny",
        *(f"launcher.environment.ACCELERATE_{name}={each}" for name, each in variables.items()),
        "--run-dir", str(run), "--", "--output_dir", str(tmp_path), "--steps", "3",
        "--backend", "gloo", cwd=tmp_path, **scripts_preloaded,
    )  # fmt: skip
    one, other = logs(run, 1)
    assert "DEEPSPEED: 2 processes" in one and "DEEPSPEED: 2 processes" in other
    # Two micro-batches a step, as the plan has it and the script does not say.
    assert "DeepSpeed config has 2. Using DeepSpeed's value" in one
    assert list(weights(one)) == [1, 2, 3] and weights(one) == weights(other)


@pytest.mark.slow
def test_deepspeeds_example_of_cifar_10_trains_with_its_own_configuration(
    tmp_path: Path, scripts_preloaded: dict[str, str]
) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    first = start(
        "launch", f"script={CIFAR}", "script_config_flag=null", "recipe=tiny",
        "--run-dir", str(run), "--", "--save", str(saved), cwd=tmp_path, **scripts_preloaded,
    )  # fmt: skip
    stop_once(first, run, saved / "latest")
    words = ("--save", str(saved), "--epochs", "4")
    trainctl("resume", str(run), "--", *words, cwd=tmp_path, **scripts_preloaded)
    before, after = (re.findall(r"epoch .*", logs(run, attempt)[0]) for attempt in (1, 2))
    assert [line.partition(",")[0] for line in after] == ["epoch 2", "epoch 3"]
    assert before[2:4] == after[: len(before[2:4])]


@pytest.mark.slow
def test_trls_sft_script_trains_and_goes_on(
    tmp_path: Path, scripts_preloaded: dict[str, str]
) -> None:
    trl = pytest.importorskip("trl")
    script = Path(trl.__file__).parent / "scripts" / "sft.py"
    write_tokenizer(tmp_path / "model")
    write_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": f"{number} and {number + 1}"}) for number in range(64)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    run, out = tmp_path / "run", tmp_path / "out"
    given = {
        "model_name_or_path": "model", "dataset_name": "data", "output_dir": out, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "logging_steps": 1, "save_steps": 2,
        "learning_rate": 0.001, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "report_to": "none",
        "disable_tqdm": True,
    }  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    first = start(
        "launch", f"script={script}", "script_config_flag=--deepspeed", "recipe=tiny",
        "zero_stage=2", "training.micro_batch_size=2", "training.global_batch_size=4",
        "optimizer.lr=0.001",
        "--run-dir", str(run), "--", *words, "--max_steps", "400", cwd=tmp_path,
        **scripts_preloaded,
    )  # fmt: skip
    stop_once(first, run, out / "checkpoint-4")
    at = ["--resume_from_checkpoint", str(out / "checkpoint-2"), "--max_steps", "4"]
    trainctl("resume", str(run), "--", *words, *at, cwd=tmp_path, **scripts_preloaded)
    assert "Training completed" in logs(run, 2)[0]
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
    assert [each["step"] for each in state["log_history"] if "loss" in each] == [1, 2, 3, 4]
    assert (out / "checkpoint-4" / "global_step4").is_dir()  # DeepSpeed's own


def write_model(folder: Path) -> None:
    """Add the weights of a small llama to a folder with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=320, num_hidden_layers=1, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
