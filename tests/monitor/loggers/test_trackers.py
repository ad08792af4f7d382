"""W&B, MLflow, Trackio and Prometheus as they are installed: each has the run as it stands.

The records are those of a real run: killed at step 26, resumed at another ZeRO stage on half the
processes, and rewound. They come in two parts, as to the followers of its two launches.
What is read back is what each tracker's own reader finds.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from processes import SECONDS, cursor, wait_for
from records_of_runs import losses

from trainctl.config.compose import compose
from trainctl.monitor.loggers.points import curve
from trainctl.options.logger import Point
from trainctl.runs.directory import create_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.rollouts import write_rollouts
from trainctl.runs.status import State, Status, write_status

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
RECORDS = Path(__file__).with_name("rewound_and_resumed.jsonl")
ELSEWHERE = ROOT / "trainctl" / "monitor" / "loggers" / "__init__.py"
CANARY = "canary-77aa"
PATIENCE = 240.0
"""Seconds for a process that imports a tracker: it runs at a low priority."""
NAMES = ("wandb", "mlflow", "trackio", "prometheus")

pytestmark = pytest.mark.slow

Curves = dict[str, dict[int, float]]
"""Metric, step, value."""


@pytest.fixture(autouse=True)
def _trackers() -> None:
    if not PYTHON.exists():
        pytest.skip("`make trackers` installs what is tested here")


def new_run(folder: Path) -> RunPaths:
    chosen = [
        "recipe=tiny",
        f"logging.to=[{','.join(NAMES)}]",
        f"logging.python={PYTHON}",
        "logging.wandb.mode=offline",
        "logging.wandb.tags=[tiny]",
        "logging.mlflow.tags={team: speech}",
        f"logging.trackio.folder={folder / 'trackio'}",
        "launcher.environment.HF_TOKEN='${oc.env:HF_TOKEN}'",
    ]
    return create_run(compose(chosen).config, run_dir=folder / "run", folder=folder)


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a logger process, with a secret and without the user's accounts."""
    return {**os.environ, "HF_TOKEN": CANARY, "GIT_PYTHON_REFRESH": "quiet", **variables}


def start(run: RunPaths, name: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [PYTHON, "-P", ELSEWHERE, run.root, name, *options],
        env=environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def parts() -> tuple[list[bytes], list[bytes]]:
    """Return the records of the killed launch, and of the launch that resumed it."""
    lines = RECORDS.read_bytes().splitlines(keepends=True)
    first = [line for line in lines if json.loads(line)["attempt"] == 1]
    return first, lines[len(first) :]


def append(run: RunPaths, lines: list[bytes]) -> None:
    with run.events.open("ab") as stream:
        stream.writelines(lines)


def finished(run: RunPaths) -> None:
    about = {"host": "a", "pid": 1, "started": 1.0, "updated": 2.0}
    write_status(run, Status(state=State.finished, attempt=2, **about))


def learnt(points: Iterator[Point]) -> Curves:
    """Return the metrics of training and evaluation. Times are left out: where a replayed step
    repeats its values, trackers that take no step twice keep the first times.
    """
    found: Curves = {}
    for point in points:
        for name, value in point.values.items():
            if name.startswith(("train/", "evaluation/")):
                found.setdefault(name, {})[point.step] = value
    return found


def check(run: RunPaths, found: Curves) -> None:
    """Assert that each step was received once, with the values of the records."""
    expected = learnt(curve(run.events, 1 << 62))
    assert {name: found.get(name) for name in expected} == expected
    assert expected["train/loss"] == losses(run)[0] and len(expected["train/loss"]) == 30


def tracker(code: str, *arguments: object) -> str:
    """Run a program by the trackers' Python and return its output."""
    done = subprocess.run(
        [PYTHON, "-c", code, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient("sqlite:///" + sys.argv[1])
experiment = client.get_experiment_by_name("trainctl").experiment_id
(run,) = client.search_runs([experiment])
history = {name: [(metric.step, metric.value)
                  for metric in client.get_metric_history(run.info.run_id, name)]
           for name in run.data.metrics}
(file,) = client.list_artifacts(run.info.run_id, "train/answers")
text = open(client.download_artifacts(run.info.run_id, file.path)).read()
tags = {**run.data.tags, "text": text, "file": file.path}
print(json.dumps([history, tags, run.data.params, run.info.status]))
"""

TRACKIO = """
import json, sys
from trackio.api import Api
from trackio.sqlite_storage import SQLiteStorage
(run,) = Api().runs("trainctl")
logs = SQLiteStorage.get_logs("trainctl", run.name, run_id=run.id)
print(json.dumps([logs, run.config], default=str))
"""

PROMETHEUS = """
import json, sys
from prometheus_client.parser import text_string_to_metric_families
text = open(sys.argv[1]).read()
print(json.dumps([[s.name, s.labels, s.value]
                  for family in text_string_to_metric_families(text) for s in family.samples]))
"""


def once(name: str, pairs: list[list[float]]) -> dict[int, float]:
    found = {int(step): value for step, value in pairs}
    assert len(found) == len(pairs), f"{name} has a step twice"
    return found


def check_mlflow(run: RunPaths) -> None:
    said = tracker(MLFLOW, run.root.parent / "mlflow.db")
    history, tags, parameters, status = json.loads(said)
    check(run, {name: once(name, pairs) for name, pairs in history.items()})
    assert tags["file"] == "train/answers/step-00000003.md" and "| 1 + 1 = | 2 |" in tags["text"]
    assert tags["team"] == "speech" and tags["trainctl.state"] == "finished"
    assert status == "FINISHED" and parameters["config.optimizer.lr"] == "0.003"
    assert parameters["config.launcher.environment.HF_TOKEN"] == "${oc.env:HF_TOKEN}"


def forget_last_parameters(database: Path) -> None:
    """Leave what MLflow has if its first sender is killed between two batches of parameters."""
    with closing(sqlite3.connect(database)) as connection, connection:
        assert connection.execute("delete from params where key like 'config.l%'").rowcount > 0


def check_trackio(run: RunPaths) -> None:
    logs, config = json.loads(tracker(TRACKIO))
    found: Curves = {}
    for row in logs:
        for name, value in row.items():
            if "/" in name:
                assert row["step"] not in found.setdefault(name, {}), f"{name} has a step twice"
                found[name][row["step"]] = value
    check(run, found)
    assert config["config.optimizer.lr"] == 0.003 and config["state"] == "finished"


def check_wandb(run: RunPaths) -> None:
    """Check the offline run by `wandb leet inspect`, which reads what `wandb sync` sends."""
    (folder,) = (run.root / "wandb").glob("offline-run-*")
    done = subprocess.run(
        [PYTHON.with_name("wandb"), "leet", "inspect", "--json", folder],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    found: Curves = {}
    last = -1
    for record in (each for each in records if each["type"] == "history"):
        row = record["history"]["item"]
        assert row["_step"] > last, "a step twice"
        last = row["_step"]
        for name, value in row.items():
            found.setdefault(name, {})[last] = value
    check(run, found)
    (table,) = folder.rglob("*.table.json")
    assert json.loads(table.read_text())["data"][0][:2] == ["1 + 1 =", "2"]


def check_prometheus(run: RunPaths) -> None:
    (file,) = (run.root / "prometheus").iterdir()
    samples = json.loads(tracker(PROMETHEUS, file))
    values = {name: value for name, labels, value in samples if "state" not in labels}
    train, evaluations = losses(run)
    assert values["trainctl_train_loss"] == train[30]
    assert values["trainctl_train_step"] == 30 == values["trainctl_evaluation_step"]
    assert values["trainctl_evaluation_loss"] == evaluations[30]
    states = {labels["state"]: value for _, labels, value in samples if "state" in labels}
    assert states == {"running": 0, "finished": 1, "failed": 0, "stopped": 0}
    assert {labels["run"] for _, labels, _ in samples} == {"run"}


CHECKS = {
    "wandb": check_wandb,
    "mlflow": check_mlflow,
    "trackio": check_trackio,
    "prometheus": check_prometheus,
}


@pytest.mark.parametrize("name", NAMES)
def test_each_step_once_over_a_kill_a_resume_elsewhere_and_rewinds(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run, (first, second) = new_run(tmp_path), parts()
    answer = {"prompt": "1 + 1 =", "answer": "2", "reward": 1.0, "rewards": {}, "advantage": 0.0}
    write_rollouts(run, 3, [answer])
    assert any(b'"intervention"' in line for line in first + second)
    follower = start(run, name, "--follow")
    append(run, first)
    wait_for(lambda: cursor(run, name).get("offset", 0), PATIENCE)
    append(run, second[: len(second) // 2])
    time.sleep(random.Random(name).random() * 2)
    follower.kill()  # as the launcher was
    follower.communicate()
    if name == "mlflow":
        forget_last_parameters(run.root.parent / "mlflow.db")
    append(run, second[len(second) // 2 :])
    finished(run)
    for _ in range(2):  # the second time there is nothing to send
        sender = start(run, name)
        said = sender.communicate(timeout=PATIENCE)[1].decode()
        assert sender.returncode == 0, said
    CHECKS[name](run)
    for path in run.root.parent.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
