"""A mirror that somebody else wrote: names, numbers and sizes in it are checked before use."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mirrors import drain, mirrored_run, save_steps

from trainctl import api
from trainctl.cli.console import print_table
from trainctl.cli.main import run as trainctl_command
from trainctl.errors import TrainctlError
from trainctl.mirror import fetch as fetch_module
from trainctl.mirror.fetch import fetch_run
from trainctl.mirror.index import (
    FileSet,
    Store,
    decode_index,
    index_key,
    newest_index,
    part_key,
    read_files,
)
from trainctl.mirror.index import read_part as part
from trainctl.mirror.uploader import Uploader
from trainctl.runs.manifest import digest


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Folder of a run with one checkpoint, and of its mirror."""
    folder = tmp_path_factory.mktemp("mirror")
    run = mirrored_run(folder / "here" / "run", f"file://{folder}/store/run")
    save_steps(run, 10)
    drain(Uploader(run))
    return folder


@pytest.fixture
def url(store, tmp_path, monkeypatch):
    """URL of a copy of the mirror, seen from another machine's folder."""
    shutil.copytree(store / "store", tmp_path / "store")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    return f"file://{tmp_path}/store/run"


def put(url: str, content: bytes) -> str:
    """Store a part and return its key."""
    key = part_key("0" * 16, hashlib.sha256(content).hexdigest())
    Store(url).write(key, content)
    return key


def forge(url: str, *, checkpoint: dict[str, object] | None = None, **fields: object) -> None:
    """List another index, with a right checksum, whose fields are replaced."""
    store = Store(url)
    newest, highest = newest_index(store)
    plain = json.loads(json.dumps(asdict(newest)))
    plain |= {**fields, "number": highest + 1}
    for each in plain["checkpoints"]:
        each |= checkpoint or {}
    content = json.dumps({**plain, "sha256": digest(plain)}).encode()
    store.write(index_key(highest + 1), content)


def with_files(url: str, key: str, change) -> str:
    """Store a list of files as `change` makes it, and return its key."""
    files = [json.loads(json.dumps(asdict(each))) for each in read_files(Store(url), key)]
    return put(url, json.dumps({"files": change(files)}).encode())


def without(text: str):
    """Return a change of a list of files that removes those with a text in their names."""
    return lambda files: [each for each in files if text not in each["name"]]


@pytest.mark.parametrize(
    "name", ["/{there}/.ssh", "../options", "..", "", "a/b", "a\0b", "a\nb", "a\ud800", "x" * 300]
)
def test_a_runs_name_is_one_component(url, tmp_path, name):
    forge(url, name=name.format(there=tmp_path / "there"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TrainctlError, match="is no name of a file") as caught:
        fetch_run(url)
    assert "--run-dir" in caught.value.hint
    with pytest.raises(TrainctlError, match="is no name of a file"), api.opened_run(url):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    assert fetch_run(url, run_dir=tmp_path / "named").checkpoints.is_dir()


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a\0", "\ud800", ".", "a/../b", "a/", 7])
def test_names_of_files_stay_below_the_run(url, tmp_path, name):
    index, _ = newest_index(Store(url))
    forge(url, records=with_files(url, index.records, lambda f: [*f, {**f[0], "name": name}]))
    with pytest.raises(TrainctlError, match=r"no name of a file|no path below|expected str"):
        fetch_run(url, run_dir=tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "changed",
    [
        lambda files: [*files, files[0]],
        lambda files: [*files, {**files[0], "name": files[0]["name"] + "/inner"}],
        lambda files: [{**each, "bytes": -1} for each in files],
        lambda files: [{**each, "bytes": 10**30} for each in files],
        lambda files: [{**each, "part_keys": ["index/00000001.json"]} for each in files],
    ],
    ids=["twice", "file and folder", "negative", "too large", "no part"],
)
def test_files_that_cannot_lie_beside_each_other_are_refused(url, tmp_path, changed):
    index, _ = newest_index(Store(url))
    forge(url, records=with_files(url, index.records, changed))
    with pytest.raises(TrainctlError, match="is damaged"):
        fetch_run(url, run_dir=tmp_path / "x")


@pytest.mark.parametrize(
    "facts",
    [
        {"stored": 1e300},
        {"stored": -5.0},
        {"bytes": 10**30},
        {"step": -1},
        {"step": 11},
        {"attempt": 2**70},
        {"metrics": {"loss": 10**400}},
        {"metrics": {"\0": 1.0}},
        {"weights_only": True},
    ],
)
def test_an_index_with_impossible_numbers_is_passed_over(url, facts):
    forge(url, checkpoint=facts)
    (row,) = api.list_checkpoints(url)
    assert row["step"] == 10 and time.localtime(row["saved"]) and row["bytes"] < 1e9


def test_empty_lists_are_no_checkpoint(url, tmp_path):
    forge(url, checkpoint={"files": put(url, FileSet().encode())})
    (row,) = api.verify_checkpoints(url)
    assert row["problems"]
    with pytest.raises(TrainctlError, match="manifest"):
        fetch_run(url, run_dir=tmp_path / "x")
    forge(url, records=put(url, FileSet().encode()))
    with pytest.raises(TrainctlError, match="is no run"):
        fetch_run(url, run_dir=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_verified_mirror_has_what_a_resume_needs(url):
    (row,) = api.verify_checkpoints(url)
    assert row["problems"] == []
    index, _ = newest_index(Store(url))
    for lacking in ("plan.json", "config.yaml", "run.json"):
        forge(url, records=with_files(url, index.records, without(lacking)))
        (row,) = api.verify_checkpoints(url)
        assert row["problems"], lacking
    forge(url, records=index.records, run="another")
    (row,) = api.verify_checkpoints(url)
    assert any("another run" in each for each in row["problems"])
    (checkpoint,) = index.checkpoints
    for lacking in ("manifest.json", "safetensors"):
        files = with_files(url, checkpoint.files, without(lacking))
        forge(url, run=index.run, checkpoint={"files": files})
        (row,) = api.verify_checkpoints(url)
        assert row["problems"], lacking


def test_a_fetched_run_runs_no_code_that_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/store"
    run = mirrored_run(
        tmp_path / "run", url, "model.factory=evil:build", "logging.alerts.command=[rm,-rf]"
    )
    save_steps(run, 10)
    drain(Uploader(run))
    with pytest.raises(TrainctlError) as caught:
        fetch_run(url, run_dir=tmp_path / "x")
    found = {finding.key: finding for finding in caught.value.findings}
    assert set(found) == {"model.factory", "logging.alerts.command"}
    assert {each.rule for each in found.values()} == {"TC580"}
    assert "evil:build" in found["model.factory"].message
    assert not list(tmp_path.glob("x*"))
    with pytest.raises(TrainctlError, match="2 problems"), api.opened_run(url):
        pass
    assert fetch_run(url, run_dir=tmp_path / "x", trusts_code=True).config.is_file()
    monkeypatch.setenv("TRAINCTL_TRUST_CODE", "1")
    assert api.fetch(url, tmp_path / "y").path == tmp_path / "y"


def test_a_dry_run_of_a_url_fetches_no_weights(url, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(fetch_module, "read_part", lambda _, key: read.append(key) or part(_, key))
    index, _ = newest_index(Store(url))
    weights = {
        key
        for file in read_files(Store(url), index.checkpoints[0].files)
        if file.name.endswith(".safetensors")
        for key in file.part_keys
    }
    with api.opened_run(url, weights=False) as copy:
        (saved,) = copy.checkpoints
        assert saved.step == 10 and copy.plan is not None
    assert weights and not weights & set(read)
    assert not copy.path.exists() and not (tmp_path / "there" / "runs").exists()


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 11, 10**30, 10**400, 1e300, "", "..", "/etc", "a/../../b", "a\0b", "\ud800",
    "step-00000010", "parts/x", [], {}, [[]], {"a": None},
)  # fmt: skip
"""Values that take the place of others."""


def change(data: st.DataObject, value: Any) -> Any:
    """Return nested plain data with a value removed, repeated or replaced."""
    value = json.loads(json.dumps(value))
    owner = value
    while True:
        keys = list(owner) if isinstance(owner, dict) else range(len(owner))
        key = data.draw(st.sampled_from(list(keys)))
        inner = owner[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        owner = inner
    kind = data.draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
    if kind == "remove":
        del owner[key]
    elif kind == "repeat" and isinstance(owner, list):
        owner.append(inner)
    else:
        owner[key] = data.draw(st.sampled_from(VALUES))
    return value


CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)


def check_fetches(url: str, folder: Path, examples: int) -> None:
    """Fetch from changed mirrors; what is fetched is what was sent, and nothing else is written."""
    store = Store(url)
    index, highest = newest_index(store)
    plain = json.loads(json.dumps(asdict(index)))
    sent = json.loads(json.dumps(asdict(FileSet(read_files(store, index.records)))))
    files = read_files(store, plain["checkpoints"][0]["files"])
    saved = json.loads(json.dumps(asdict(FileSet(files))))
    contents = {
        **{f"{each['name']}": each["sha256"] for each in sent["files"]},
        **{f"checkpoints/step-00000010/{each['name']}": each["sha256"] for each in saved["files"]},
    }
    before = {path for path in folder.rglob("*") if "store" not in path.parts}

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=CHECKS)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        made = json.loads(json.dumps(plain)) | {"number": highest + 1}
        match data.draw(st.sampled_from(["index", "records", "checkpoint"])):
            case "index":
                made = change(data, made)
            case "records":
                made["records"] = put(url, json.dumps(change(data, sent)).encode())
            case "checkpoint":
                made["checkpoints"][0]["files"] = put(url, json.dumps(change(data, saved)).encode())
        content = json.dumps({**made, "sha256": digest(made)}).encode()
        store.write(index_key(highest + 1), content)
        target = folder / "fetched"
        try:
            for row in api.list_checkpoints(url):
                time.localtime(row["saved"])
            api.verify_checkpoints(url)
            run = fetch_run(url, run_dir=target)
            for name, sha256 in contents.items():
                path = run.root / name
                if path.is_file():
                    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256, name
        except TrainctlError:
            pass
        finally:
            for path in folder.glob("fetched*"):
                shutil.rmtree(path)
        assert {path for path in folder.rglob("*") if "store" not in path.parts} == before

    check()


def test_a_changed_mirror_is_refused_or_fetched_as_it_was(url, tmp_path):
    check_fetches(url, tmp_path, 12)


@pytest.mark.slow
def test_many_changed_mirrors_are_refused_or_fetched_as_they_were(url, tmp_path):
    check_fetches(url, tmp_path, 60)


@pytest.mark.slow
def test_no_index_that_is_taken_says_what_cannot_be(url):
    index, _ = newest_index(Store(url))
    plain = json.loads(json.dumps(asdict(index)))

    @settings(max_examples=2000, deadline=None, database=None, suppress_health_check=CHECKS)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        made = change(data, plain)
        try:
            found = decode_index(json.dumps({**made, "sha256": digest(made)}).encode(), "index")
        except TrainctlError as error:
            assert "newer trainctl" in error.message
            return
        for each in () if found is None else found.checkpoints:
            assert each.step == int(each.name.rpartition("-")[2]) and 0 <= each.bytes < 2**63
            assert time.localtime(each.stored)

    check()


def test_a_dry_run_by_the_command_leaves_nothing(url, tmp_path, capfd):
    before = sorted(tmp_path.rglob("*"))
    assert trainctl_command(["resume", url, "--dry-run"]) == 0
    assert "resuming" in capfd.readouterr().err and sorted(tmp_path.rglob("*")) == before
    assert trainctl_command(["resume", url, "--dry-run", "--prove"]) == 2


def test_forty_thousand_checkpoints_are_listed_in_seconds(capfd):
    began = time.process_time()
    print_table(("step", "saved"), ((f"{n}", "today") for n in range(40_000)), right=(0,))
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 40_001 and lines[1] == "    0  today"
    assert time.process_time() - began < 5
