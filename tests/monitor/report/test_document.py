"""The document of runs, the page that carries it, and the command that writes them."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from made_runs import append, drawn, new_run, other, step

from trainctl.cli.main import run as command
from trainctl.config.overrides import SweepPoint
from trainctl.errors import ExitCode
from trainctl.monitor.report.document import report_document, report_rows
from trainctl.monitor.report.history import History
from trainctl.monitor.report.page import RUNS_PAGE, PageSource
from trainctl.monitor.report.panels import MOST_PROFILES, PROFILE_BYTES
from trainctl.monitor.report.watching import WatchApp
from trainctl.runs.directory import new_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.provenance import git_state
from trainctl.runs.sweeps import new_sweep

AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@example.org"]


def read(*runs: RunPaths) -> list[History]:
    histories = [History(run) for run in runs]
    for history in histories:
        history.read()
    return histories


def test_a_run_that_has_not_begun(untrained: RunPaths) -> None:
    document = report_document(read(untrained), price=1.0)
    (found,) = document["runs"]
    assert found["state"] == "new" and found["step"] == 0 and found["series"] == {}
    assert "</html>" in RUNS_PAGE.html(document, title="run")


def test_what_is_said_of_a_run(tmp_path: Path) -> None:
    trouble = {"kind": "norm_spike", "value": 9.0, "limit": 3.0, "policy": "rewind"}
    run = new_run(tmp_path / "run", "optimizer.lr=2e-3")
    append(
        run,
        iter(
            [
                step(1, time="x"),
                other("start", step=0, world_size=2, num_parameters=10, resumed_from=None),
                *map(step, range(1, 9)),
                other("intervention", step=9, samples=[1, 2], ranks=[1], to_step=4, **trouble),
                *map(step, range(5, 9)),
                other("evaluation", step=8, loss="NaN"),
                other("evaluation", step=8, loss=3.0),
                other("failure", message="rank 1 was killed", cause="killed", rank=1),
                other("unheard_of", step="x"),
                other("memory", step=1, measured={}, phases=7),
                other("checkpoint", step=8),  # of another version: it lacks what is told
                other("memory", step=2, measured={"device_peak_bytes": 7}, planned=None),
            ]
        ),
    )
    (found,) = report_document(read(run), is_packed=False)["runs"]
    assert found["axes"]["step"] == list(range(1, 9)) and found["num_parameters"] == 10
    assert [branch["steps"] for branch in found["branches"]] == [1, 4]
    marks = {mark["kind"]: mark for mark in found["marks"]}
    assert set(marks) == {"start", "intervention", "failure"}
    assert marks["intervention"]["text"].startswith("rewind to step 4")
    assert marks["intervention"]["cause"] == "gradient norm 9 above 3 on rank 1"
    assert marks["failure"]["step"] == 8  # the last one before it
    assert found["evaluations"]["best"] == {"loss": 3.0, "step": 8, "last": 3.0}
    assert found["memory"]["measured"] == {"device_peak_bytes": 7}
    assert found["memory"]["planned_bytes"] > 0 and found["memory"]["phases"]
    assert found["layout"]["ranks"] == [[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]]


def test_the_revision_that_a_run_came_from_is_on_its_page(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for words in (["init", "-q"], [*AUTHOR, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    state, _ = git_state(tmp_path)
    assert state is not None
    record = run.root / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "git": state}))
    (found,) = report_document(read(run))["runs"]
    assert found["provenance"]["git"] == {"revision": state["revision"], "changed": False}


def test_proofs_are_listed_and_damaged_ones_left_out(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.proofs.mkdir()
    proof = {"checkpoint": 4, "changes": ["zero_stage=3"], "versions": {}, "verdict": "differs"}
    for number, more in ((1, {"sentence": "differs, first in ...", "exit_code": 6}), (2, {})):
        (run.proofs / f"{number}.json").write_text(json.dumps({**proof, **more}))
    (run.proofs / "10.json").write_text("{")
    (found,) = report_document(read(run))["runs"]
    assert [each["is_good"] for each in found["proofs"]] == [False]
    assert found["proofs"][0]["sentence"].startswith("differs")


def test_profiles_of_the_newest_attempt_that_has_some_are_shown_cut(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    assert report_document(read(run))["runs"][0]["profiles"] == []
    for number in (2, 3):
        new_attempt(run, read_plan(run.attempt(1).plan))
        assert run.attempt(number).root.is_dir()
    folders = [run.attempt(number).profile for number in (1, 2)]
    for folder in folders:
        folder.mkdir()
        (folder / "rank-0.txt").write_text(f"{folder.parent.name}\t\x1b[2J</script>\n")
    (folders[1] / "rank-10.txt").write_bytes(b"\xff" * 2 * PROFILE_BYTES)
    (folders[1] / "rank-2.txt").symlink_to("/dev/zero")
    (folders[1] / "rank-x.txt").touch()
    os.mkfifo(folders[1] / "rank-3.txt")
    (found,) = report_document(read(run))["runs"]
    assert [(each["attempt"], each["rank"]) for each in found["profiles"]] == [(2, 0), (2, 10)]
    first, second = (each["text"] for each in found["profiles"])
    assert first == "2\ufffd\ufffd[2J</script>\n"
    assert second == "\ufffd" * PROFILE_BYTES + "…\n"
    for rank in range(20, 40):
        (folders[1] / f"rank-{rank}.txt").write_text("ms")
    assert len(report_document(read(run))["runs"][0]["profiles"]) <= MOST_PROFILES


def test_ranks_lie_as_the_mesh_has_them(tmp_path: Path) -> None:
    run = new_run(
        tmp_path / "run",
        *("parallelism.tensor=2", "parallelism.pipeline=2", "zero_stage=1"),
        devices=8,
    )
    layout = report_document(read(run))["runs"][0]["layout"]
    sizes = {"data": 2, "tensor": 2, "sequence": 1, "context": 1, "pipeline": 2, "expert": 1}
    assert layout["mesh"] == sizes
    # Tensor is the fastest axis and the stage the slowest.
    places = [(tensor, data, stage) for _, data, tensor, _, _, stage in layout["ranks"]]
    assert places == [(t, d, s) for s in (0, 1) for d in (0, 1) for t in (0, 1)]
    assert layout["blocks"] == [[[0, 2]], [[2, 4]]] and layout["shards"]["optimizer states"] == 2


def test_what_differs_between_runs_and_attempts(tmp_path: Path) -> None:
    one, two = (new_run(tmp_path / name, f"optimizer.lr={name}") for name in ("1e-3", "2e-3"))
    for run in (one, two):
        append(run, iter([other("launch", host="a", pid=1, ranks=2), step(1)]))
    document = report_document(read(one, two))
    assert document["differences"] == [{"key": "optimizer.lr", "values": ["0.001", "0.002"]}]
    new_attempt(one, read_plan(two.attempt(1).plan))
    append(one, iter([other("launch", attempt=2, host="a", pid=1, ranks=2), step(2, attempt=2)]))
    (found,) = report_document(read(one))["runs"]
    assert found["attempts"]["numbers"] == [1, 2]
    assert [each["key"] for each in found["attempts"]["differences"]] == ["optimizer.lr"]


def test_all_forms_have_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = new_run(tmp_path / "run")
    append(run, drawn(1, 500))
    arguments = ["report", str(run.root), "--buckets", "64"]
    assert command([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert command([*arguments, "--csv", "-o", "out.csv"]) == 0
    table = list(csv.reader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert table == [["" if v is None else str(v) for v in row] for row in report_rows(document)]
    found = document["runs"][0]["series"]["loss"]
    assert 50 < len(found["mean"]) <= 65
    assert command([*arguments]) == 0
    written = (tmp_path / "report.html").read_text()
    inside = re.search(r'id="data">(.*?)</script>', written, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1])["runs"][0]["marks"] == document["runs"][0]["marks"]
    assert command(["report", str(run.root), "--csv", "--buckets", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 501


def test_a_sweep_s_folder_stands_for_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    points = [SweepPoint(overrides=(), values={"optimizer.lr": lr}) for lr in ("1e-3", "2e-3", "1")]
    folder = new_sweep(Path("rates"), ["recipe=tiny", "optimizer.lr=1e-3,2e-3,1"], points)
    assert command(["report", "rates"]) == ExitCode.run_state
    assert "none of the 3 runs of the sweep rates has been made yet" in capsys.readouterr().err
    for index, rate in enumerate(("1e-3", "2e-3")):  # the third is not made yet
        append(new_run(folder / str(index), f"optimizer.lr={rate}"), drawn(1, 5))
    assert command(["report", "rates", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in made["runs"]] == ["0", "1"]
    assert made["differences"] == [{"key": "optimizer.lr", "values": ["0.001", "0.002"]}]
    assert command(["report", "rates"]) == 0
    assert "<title>rates" in Path("report.html").read_text()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Run that has not begun; tests must not change it."""
    return new_run(tmp_path_factory.mktemp("untrained") / "run")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--json", "--csv"], ExitCode.bad_input, "two forms"),
        (["--buckets", "3"], ExitCode.bad_input, "at least 64"),
        (["--price", "inf"], ExitCode.bad_input, "no price"),
        (["-o", "no/such/file.html"], ExitCode.bad_input, "there is no folder no/such"),
        (["nowhere"], ExitCode.run_state, "does not exist"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    untrained: RunPaths,
) -> None:
    assert command(["report", str(untrained.root), *arguments]) == code
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_whatever_stands_in_the_records_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    steps = [step(1, loss=1e300, values={"accuracy": 0.5}), step(2, values={"accuracy": 10**400})]
    message = "no file a\udc80\ud800"  # of a name that is no UTF-8
    append(run, iter([*steps, other("failure", message=message, cause="reported", rank=0)]))
    for name in ("page.html", "curves.json"):
        more = ["--json"] if name == "curves.json" else []
        assert command(["report", str(run.root), "-o", str(tmp_path / name), *more]) == 0
        assert "no file a\\udc80\\ud800" in (tmp_path / name).read_text()
    assert command(["report", str(run.root), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["series"]["values/accuracy"]["mean"] == [0.5, None]
    for path in ("/", "/data.json"):
        answer = WatchApp([run]).respond(path, {})
        assert answer is not None and answer.status == 200


def test_nothing_in_a_page_is_taken_for_markup(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    evil = "</script><script>alert(1)</script>{{css}}"
    append(run, iter([other("logger", name=evil, problem="\u2028<!--")]))
    written = RUNS_PAGE.html(report_document(read(run)), title=evil)
    assert written.count("<script>") == 3 and "alert(1)</script>" not in written
    inside = re.search(r'id="data">(.*?)</script>', written, re.DOTALL)
    assert inside is not None and evil in json.loads(inside[1])["runs"][0]["marks"][0]["text"]


@pytest.mark.parametrize("source", [None, PageSource("data.json?token=a")])
def test_only_what_is_in_the_page_may_run(source: PageSource | None) -> None:
    written = RUNS_PAGE.html(title="run", source=source)
    policy = re.search(r'Policy" content="([^"]*)"', written)
    assert policy is not None and policy[1].startswith("default-src 'none'")
    for kind in ("script", "style"):
        for text in re.findall(rf"<{kind}>(.*?)</{kind}>", written, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy[1]
    assert ("connect-src" in policy[1]) == (source is not None)
    assert not re.search(r"(src|href)=.?https?:", written)
