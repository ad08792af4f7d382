"""Programs and functions of the user's, by the real command: a stand-in and the examples."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from commands import TINY, curve, events, finish, live_processes, start, trainctl
from small_recipe import write_small_tiny

from trainctl.runs.layout import RunPaths

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PAGE = EXAMPLES.parent / "your-own-script.md"

HOSTILE = "$(touch pwned) `touch pwned` 'q\" ;touch pwned"
SCRIPT = """
import json, os, pathlib, signal, subprocess, sys, time

rank = os.environ["RANK"]
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TRAINCTL_PLAN"
names += " TRAINCTL_DEEPSPEED_CONFIG TRAINCTL_RUN_DIR TRAINCTL_ATTEMPT DS_ACCELERATOR"
names += " OWN NCCL_OWN"
env = {name: os.environ.get(name) for name in names.split()}
facts = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": env}
pathlib.Path(os.environ["TRAINCTL_RUN_DIR"], f"facts-{rank}.json").write_text(json.dumps(facts))
print(f"rank {rank} says hello", flush=True)
if "--wait" in sys.argv:
    def leave(*_):
        print(f"rank {rank} was asked to end", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("waiting", flush=True)
    time.sleep(1000)
if "--code" in sys.argv and rank == "1":
    print("what went wrong", file=sys.stderr)
    sys.exit(int(sys.argv[sys.argv.index("--code") + 1]))
"""


def facts(run, rank):
    return json.loads((run / f"facts-{rank}.json").read_text())


@pytest.mark.slow
def test_a_script_is_started_again_as_it_was(tmp_path, preloaded_server):
    """Values that a shell would execute arrive as they are: words, variables, names of folders."""
    work, run = tmp_path / f"work {HOSTILE}", tmp_path / f"run {HOSTILE}"
    work.mkdir()
    (work / "own.py").write_text(SCRIPT)
    words = ["--lr", "${x} 'y'", HOSTILE, "-oProxyCommand=touch pwned", "--code", "0"]
    said = trainctl(
        "launch", "script=own.py", "recipe=tiny", f"launcher.environment.OWN={json.dumps(HOSTILE)}",
        "launcher.plain_environment=[OWN]", "--run-dir", str(run), "--", *words,
        cwd=work, NCCL_OWN=f"{HOSTILE}\ntouch pwned",
    )  # fmt: skip
    assert not list(tmp_path.rglob("pwned"))
    assert "rank 0 says hello" in said and "rank 1 says hello" not in said
    attempt = RunPaths(run).attempt(1)
    for rank in (0, 1):
        found = facts(run, rank)
        assert found["argv"] == [*words, "--deepspeed_config", str(attempt.deepspeed)]
        assert found["cwd"] == str(work)
        env = found["env"]
        assert (env["OWN"], env["NCCL_OWN"]) == (HOSTILE, f"{HOSTILE}\ntouch pwned")
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert env["MASTER_ADDR"] and int(env["MASTER_PORT"]) > 0
        assert env["TRAINCTL_DEEPSPEED_CONFIG"] == str(attempt.deepspeed)
        assert json.loads(Path(env["TRAINCTL_PLAN"]).read_text())["deepspeed"] == json.loads(
            attempt.deepspeed.read_text()
        )
        assert f"rank {rank} says hello" in attempt.rank_log(rank).read_text()
    assert json.loads(RunPaths(run).status.read_text())["state"] == "finished"

    # From another folder, with nothing but the run's name: no checkpoint is asked for.
    said = trainctl("resume", str(run), cwd=tmp_path, **preloaded_server.environment)
    assert "starting own.py" in said and "configuration: unchanged" in said
    again = facts(run, 1)
    assert again["argv"][:-1] == [*words, "--deepspeed_config"] and again["cwd"] == str(work)
    assert again["env"]["TRAINCTL_ATTEMPT"] == "2"


@pytest.mark.slow
def test_a_script_that_fails_has_its_code_in_the_report_and_may_be_restarted(tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    run = tmp_path / "run"
    said = trainctl(
        "launch", "script=own.py", "recipe=tiny", "launcher.max_restarts=1", "--run-dir", "run",
        "--", "--code", "3",
        cwd=tmp_path, code=6,
    )  # fmt: skip
    assert "ended with exit code 3" in said and "what went wrong" in said
    failures = events(run, "failure")
    # Without checkpoints of ours nobody knows of progress, so all restarts are used.
    assert [f["exit_code"] for f in failures] == [3] * 2
    assert {f["rank"] for f in failures} == {1}
    assert "launcher.max_restarts=1 is used up" in said
    assert not live_processes(run)


@pytest.mark.slow
def test_sigterm_reaches_a_script_and_nothing_is_left(tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    run = tmp_path / "run"
    # Times that would have trainctl's own ranks ended long before: no heartbeat is demanded.
    typed = ["launcher.heartbeat_seconds=0.2", "launcher.slow_phase_seconds=0.2"]
    launch = start(
        "launch", "script=own.py", "recipe=tiny", *typed, "launcher.stop_grace_seconds=60",
        "--run-dir", "run", "--", "--wait",
        cwd=tmp_path,
    )  # fmt: skip
    logs = [RunPaths(run).attempt(1).rank_log(rank) for rank in (0, 1)]
    try:
        deadline = time.monotonic() + 60
        while not all(log.is_file() and "waiting" in log.read_text() for log in logs):
            assert time.monotonic() < deadline and launch.poll() is None
            time.sleep(0.05)
        time.sleep(1.5)
        # An agent, two ranks, a child of each, and what sends the metrics.
        assert len(live_processes(run)) == 6
        launch.send_signal(signal.SIGTERM)
    finally:
        code, out, err = finish(launch, timeout=30)
    assert code == 143, out + err
    assert all("was asked to end" in log.read_text() for log in logs)
    assert "launcher.heartbeat_seconds has no effect" in err
    assert "launcher.stop_grace_seconds has no effect" in err
    assert not live_processes(run)
    assert json.loads(RunPaths(run).status.read_text())["state"] == "stopped"


def test_records_of_a_script_as_json(tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    code, out, err = finish(
        start("launch", "script=own.py", "recipe=tiny", "--json", "--", cwd=tmp_path)
    )
    assert code == 0, err
    kinds = [json.loads(line)["event"] for line in out.splitlines()]
    assert kinds == ["launch", "program", "not_joined"]  # it opens no process group


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_functions_of_the_user_s_train(tmp_path):
    """Model and text are the user's; training, checkpoints and export are trainctl's."""
    shutil.copy(EXAMPLES / "own_functions.py", tmp_path)
    run = tmp_path / "run"
    mine = ["model.factory=own_functions:model", "data.factory=own_functions:text"]
    trainctl(
        "launch", *TINY, *mine, "zero_stage=3", "training.steps=2", "--run-dir", "run", cwd=tmp_path
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    trainctl("resume", str(run), "training.steps=4", cwd=elsewhere)
    assert list(curve(run)) == [1, 2, 3, 4]
    (evaluation, *_) = events(run, "evaluation")
    assert evaluation["step"] == 2
    trainctl("export", str(run), "exported", cwd=elsewhere)
    config = json.loads((elsewhere / "exported" / "config.json").read_text())
    assert config["attention_bias"] is True


def shown_commands():
    """Return the arguments of the launches that the page shows."""
    text = PAGE.read_text()
    return re.findall(r"^\$ trainctl (launch .*)$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("command", shown_commands())
def test_the_examples_run_as_the_page_shows(tmp_path, command, scripts_preloaded):
    """With a recipe `tiny` that takes seconds; its model, too, where the command leaves it."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    write_small_tiny(tmp_path, **({"model": ""} if "model=module" in command else {}))
    if "model.factory=mine:" in command:  # the page says how it is made
        trainctl("new", "model", "mine", cwd=tmp_path)
    said = trainctl(*command.split(), cwd=tmp_path, **scripts_preloaded)
    (run,) = (tmp_path / "runs").iterdir()
    if "factory" in command:
        assert curve(run)
        return
    losses = [float(found) for found in re.findall(r"loss'?:? '?([0-9.]+)", said)]
    assert len(losses) >= 3
    for rank in (0, 1):
        log = RunPaths(run).attempt(1).rank_log(rank).read_text()
        assert "terminate called" not in log and "Traceback" not in log
