"""What is listed in a mirror is whole, whatever the store does, and one run writes to it."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from functools import partial

import pytest
from bucket import s3_server
from mirrors import (
    FaultyStore,
    check_whole,
    drain,
    listed,
    mirrored_run,
    record,
    save_steps,
    unlisted_parts,
)

from trainctl import api
from trainctl.errors import ExitCode, TrainctlError
from trainctl.mirror import index as index_module
from trainctl.mirror import uploader as uploader_module
from trainctl.mirror.fetch import FETCHING, Mirror, fetch_run, fetched_checkpoint, owner_finding
from trainctl.mirror.index import Store, index_key, newest_index
from trainctl.mirror.uploader import Uploader
from trainctl.monitor.loggers.alerts import ALERTS, Alerter
from trainctl.runs import mirror_state
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import (
    archive_later_checkpoints,
    list_checkpoints,
    rotate_checkpoints,
)
from trainctl.runs.directory import run_id
from trainctl.runs.files import ensure_folder
from trainctl.runs.manifest import verify
from trainctl.runs.mirror_state import (
    describe_mirror,
    kept_for_mirror,
    mirror_text,
    read_mirror_state,
    write_mirror_state,
)
from trainctl.runs.records import EventWriter, read_events


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    """URL of an empty mirror: in a folder, and on a server that speaks S3."""
    if request.param == "file":
        yield f"file://{tmp_path}/store/run"
        return
    with s3_server():
        yield "s3://corpus/runs/a"


@pytest.fixture
def folder_url(tmp_path):
    return f"file://{tmp_path}/store/run"


def test_a_run_is_fetched_as_it_was_sent(url, tmp_path, monkeypatch):
    monkeypatch.setattr(uploader_module, "PART_BYTES", 700)  # several parts to a file
    run = mirrored_run(tmp_path, url)
    save_steps(run, 10, 20, metrics={"loss": 2.0})
    save_steps(run, 20, weights_only=True)
    uploader = Uploader(run)
    drain(uploader)
    assert check_whole(url) == ["step-00000010", "step-00000020", "weights-00000020"]
    assert not unlisted_parts(url)
    record(run, 2, 3)
    uploader.end()
    fetched = fetch_run(url, run_dir=tmp_path / "fresh")
    assert [info.step for info in list_checkpoints(fetched)] == [20]
    assert verify(fetched.checkpoints / "step-00000020", run_id(run)) == []
    for path in (run.config, run.record, run.events):
        assert (fetched.root / path.name).read_bytes() == path.read_bytes()
    assert [event["step"] for event in read_events(fetched.events, "step")] == [1, 2, 3]
    assert not fetched.root.with_name("fresh" + FETCHING).exists()
    earlier = fetch_run(url, run_dir=tmp_path / "earlier", step=10)
    assert [info.step for info in list_checkpoints(earlier)] == [10]
    with pytest.raises(TrainctlError, match="lists no checkpoint of step 30"):
        fetch_run(url, run_dir=tmp_path / "none", step=30)
    with pytest.raises(TrainctlError, match="exists and is a run"):
        fetch_run(url, run_dir=tmp_path / "fresh")
    with fetched_checkpoint(url, best=True) as chosen:
        assert chosen.checkpoints.is_dir()
    assert not chosen.root.exists()


def test_a_record_whose_name_no_fetch_accepts_is_told_and_left_out(folder_url, tmp_path):
    run = mirrored_run(tmp_path, folder_url)
    ensure_folder(run.callbacks)
    (run.callbacks / "good").write_text("x")
    (run.callbacks / "bad\nname").write_text("x")
    save_steps(run, 10)
    with pytest.raises(TrainctlError, match="a record is not sent"):
        drain(Uploader(run))
    fetched = fetch_run(folder_url, run_dir=tmp_path / "fresh")
    assert [path.name for path in fetched.callbacks.iterdir()] == ["good"]


def test_rotation_applies_to_the_mirror_and_leaves_nothing(folder_url, tmp_path):
    run = mirrored_run(tmp_path, folder_url, "checkpoint.best_of=loss")
    uploader = Uploader(run)
    for step, loss in ((10, 1.0), (20, 3.0), (30, 2.0), (40, 4.0)):
        save_steps(run, step, metrics={"loss": loss})
        drain(uploader)
    assert check_whole(folder_url) == ["step-00000010", "step-00000030", "step-00000040"]
    assert not unlisted_parts(folder_url)
    store = Store(folder_url)
    _, highest = newest_index(store)
    assert index_module.index_keys(store) == [index_key(highest)]


def test_a_checkpoint_that_was_sent_in_part_is_continued(folder_url, tmp_path, monkeypatch):
    monkeypatch.setattr(uploader_module, "PART_BYTES", 300)
    run = mirrored_run(tmp_path, folder_url)
    store = FaultyStore(folder_url)
    uploader = Uploader(run, store)
    assert uploader.send()
    save_steps(run, 500)
    store.full_after = store.writes + 9
    with pytest.raises(TrainctlError, match="no space left"):
        drain(uploader)  # records may come before it
    uploader.give_up("no space left")
    assert listed(folder_url) == [] and unlisted_parts(folder_url)
    assert read_mirror_state(run).problem == "no space left"
    before = set(index_module.part_keys(store))
    again = FaultyStore(folder_url)
    drain(Uploader(run, again))
    assert check_whole(folder_url) == ["step-00000500"] and not unlisted_parts(folder_url)
    assert not before & again.written, "parts that are there are not sent again"
    assert read_mirror_state(run).problem == ""


@pytest.mark.parametrize("fault", ["full", "refuses", "drops", "truncates", "flips"])
def test_a_store_with_a_fault_lists_nothing_and_recovers(folder_url, tmp_path, fault):
    run = mirrored_run(tmp_path, folder_url)
    store = FaultyStore(folder_url)
    uploader = Uploader(run, store)
    drain(uploader)
    save_steps(run, 10)
    store.fault = fault
    with pytest.raises(TrainctlError) as caught:
        uploader.send()
    assert caught.value.exit_code == ExitCode.environment
    uploader.give_up(caught.value.message)
    assert listed(folder_url) == []
    store.fault = ""
    drain(uploader)
    assert check_whole(folder_url) == ["step-00000010"]


def test_a_store_that_overwrites_in_spite_of_the_condition_is_refused(folder_url, tmp_path):
    run = mirrored_run(tmp_path, folder_url)
    store = FaultyStore(folder_url)
    store.fault = "overwrites"
    with pytest.raises(TrainctlError, match="replaces an object although it must not"):
        Uploader(run, store).send()


def test_two_runs_do_not_share_a_mirror(folder_url, tmp_path):
    first, second = (mirrored_run(tmp_path / name, folder_url) for name in ("a", "b"))
    save_steps(first, 10)
    save_steps(second, 20)
    uploader = Uploader(first)
    drain(uploader)
    with pytest.raises(TrainctlError, match="mirror of another run"):
        Uploader(second).send()
    save_steps(first, 30)
    drain(uploader)
    assert check_whole(folder_url) == ["step-00000010", "step-00000030"]


def test_the_former_machine_cannot_list_after_another_took_over(folder_url, tmp_path):
    run = mirrored_run(tmp_path / "old", folder_url)
    old = Uploader(run)
    save_steps(run, 10)
    drain(old)
    fresh, other = (fetch_run(folder_url, run_dir=tmp_path / name) for name in ("new", "other"))
    save_steps(run, 20)
    drain(old)
    assert listed(folder_url) == ["step-00000010", "step-00000020"]
    new = Uploader(fresh)
    drain(new)
    assert listed(folder_url) == ["step-00000010"], "what came after the fetch is of the old run"
    save_steps(run, 30)
    with pytest.raises(TrainctlError, match="does not have what was listed last"):
        old.send()
    old.give_up("")
    for late in (old, Uploader(run), Uploader(other)):
        with pytest.raises(TrainctlError, match="another copy of this run"):
            late.send()
    save_steps(fresh, 15, attempt=2)
    drain(new)
    assert check_whole(folder_url) == ["step-00000010", "step-00000015"]
    assert not unlisted_parts(folder_url)


def test_a_copied_run_directory_cannot_list_beside_its_original(folder_url, tmp_path):
    run = mirrored_run(tmp_path / "run", folder_url)
    drain(Uploader(run))
    copy = type(run)(tmp_path / "copy")
    shutil.copytree(run.root, copy.root)
    save_steps(run, 10)
    drain(Uploader(run))
    with pytest.raises(TrainctlError, match="another copy of this run"):
        Uploader(copy).send()


def test_what_a_resume_from_an_earlier_step_leaves_behind_is_unlisted(folder_url, tmp_path):
    run = mirrored_run(tmp_path, folder_url)
    uploader = Uploader(run)
    save_steps(run, 10, 20)
    drain(uploader)
    archive_later_checkpoints(run, 10, attempt=2)
    drain(uploader)
    assert listed(folder_url) == ["step-00000010"]
    save_steps(run, 20, attempt=2)
    drain(uploader)
    assert check_whole(folder_url) == ["step-00000010", "step-00000020"]
    assert Mirror(folder_url).index.checkpoints[1].attempt == 2


def test_a_checkpoint_that_is_damaged_on_the_disk_is_not_listed_and_others_are(
    folder_url, tmp_path
):
    run = mirrored_run(tmp_path, folder_url)
    save_steps(run, 10, 20)
    file = run.checkpoints / "step-00000020" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    uploader = Uploader(run)
    with pytest.raises(TrainctlError, match="is damaged on this disk"):
        drain(uploader)
    assert check_whole(folder_url) == ["step-00000010"]
    assert "damaged on this disk" in read_mirror_state(run).problem


def test_a_store_that_was_emptied_is_filled_again(folder_url, tmp_path):
    run = mirrored_run(tmp_path, folder_url)
    save_steps(run, 10)
    drain(Uploader(run))
    shutil.rmtree(tmp_path / "store")
    drain(Uploader(run))
    assert check_whole(folder_url) == ["step-00000010"]


def test_a_store_that_loses_everything_while_the_process_lives_is_filled_again(
    folder_url, tmp_path
):
    run = mirrored_run(tmp_path, folder_url)
    save_steps(run, 10)
    uploader = Uploader(run)
    drain(uploader)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(TrainctlError, match="does not have what was listed last"):
        uploader.end()
    save_steps(run, 20)
    with pytest.raises(TrainctlError, match="does not have what was listed last"):
        uploader.send()
    uploader.give_up("lost")
    drain(uploader)
    assert check_whole(folder_url) == ["step-00000010", "step-00000020"]


def test_damage_in_the_store_is_found_by_verification_and_by_a_fetch(folder_url, tmp_path):
    run = mirrored_run(tmp_path, folder_url)
    save_steps(run, 10)
    drain(Uploader(run))
    mirror = Mirror(folder_url)
    (checkpoint,) = mirror.index.checkpoints
    key = index_module.read_files(Store(folder_url), checkpoint.files)[0].part_keys[0]
    part = tmp_path / "store" / "run" / key
    part.write_bytes(part.read_bytes()[:-1])
    (problem,) = mirror.verify(checkpoint, lambda *_: None)
    assert "damaged" in problem
    with pytest.raises(TrainctlError, match="is damaged"):
        fetch_run(folder_url, run_dir=tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()
    part.unlink()
    (problem,) = mirror.verify(checkpoint, lambda *_: None)
    assert "missing" in problem


def test_an_index_that_names_files_outside_the_run_is_refused(folder_url, tmp_path):
    run = mirrored_run(tmp_path, folder_url)
    drain(Uploader(run))
    store = Store(folder_url)
    evil = index_module.FileSet((index_module.StoredFile("../../evil", 0, "", ()),)).encode()
    key = index_module.part_key("0" * 16, uploader_module.hashlib.sha256(evil).hexdigest())
    store.write(key, evil)
    with pytest.raises(TrainctlError, match="no name of a file"):
        index_module.read_files(store, key)


def test_there_is_no_mirror(tmp_path):
    with pytest.raises(TrainctlError, match="there is no mirror of a run"):
        Mirror(f"file://{tmp_path}/nothing")


def test_the_bandwidth_is_bounded(folder_url, tmp_path, monkeypatch):
    monkeypatch.setattr(uploader_module, "PART_BYTES", 1 << 12)
    run = mirrored_run(tmp_path, folder_url, "checkpoint.mirror_bandwidth=100000")
    save_steps(run, 10_000)
    slept = []
    monkeypatch.setattr(uploader_module.time, "sleep", slept.append)
    drain(Uploader(run))
    assert max(slept) > 2 * 40_000 / 100_000 * 0.8, "40 kB there and back"


def test_a_launch_is_told_that_a_mirror_is_another_runs(folder_url, tmp_path):
    run = mirrored_run(tmp_path / "run", folder_url)
    assert owner_finding(folder_url, None) is None
    drain(Uploader(run))
    assert owner_finding(folder_url, run_id(run)) is None
    for url, said in (
        (folder_url, "mirror of another run, run"),
        (f"file://{run.root}", "is a run"),
    ):
        finding = owner_finding(url, None)
        assert finding.rule == "TC177" and said in finding.message


def test_rotation_spares_what_the_mirror_lacks_and_then_lets_it_go(
    folder_url, tmp_path, monkeypatch
):
    run = mirrored_run(tmp_path, folder_url)
    config = config_of(run).checkpoint
    uploader = Uploader(run)

    def rotated(*, keep: int = 2) -> list[int]:
        spare = partial(kept_for_mirror, run, keep=keep)
        rotate_checkpoints(run, config, spare=spare)
        return [info.step for info in list_checkpoints(run)]

    save_steps(run, 10, 20, 30, 40, 50)
    write_mirror_state(run, replace(read_mirror_state(run), sending="step-00000010"))
    assert rotated() == [10, 30, 40, 50], "the one that is sent, the newest other, and those kept"
    found = describe_mirror(run, config)
    assert found["waiting"] == ["step-00000040", "step-00000050"] and found["step"] is None
    drain(uploader)
    assert rotated() == [40, 50]
    assert describe_mirror(run, config)["waiting"] == []
    save_steps(run, 60)
    write_mirror_state(run, replace(read_mirror_state(run), stored={}))
    full = namedtuple("usage", "total used free")(100, 100, 0)
    monkeypatch.setattr(mirror_state.shutil, "disk_usage", lambda _: full)
    assert rotated() == [50, 60]


def test_the_runs_of_a_sweep_do_not_share_a_mirror(folder_url, tmp_path):
    with pytest.raises(TrainctlError, match="is the mirror of one run"):
        api.sweep(
            "recipe=tiny",
            "optimizer.lr=1e-3,1e-4",
            f"checkpoint.mirror={folder_url}",
            sweep_dir=tmp_path / "sweep",
        )
    assert not (tmp_path / "sweep").exists()


def test_what_waits_is_said_in_a_sentence(folder_url, tmp_path):
    run = mirrored_run(tmp_path, folder_url)
    config = config_of(run).checkpoint
    save_steps(run, 10)
    found = describe_mirror(run, config)
    assert mirror_text(found).startswith(f"{folder_url} has nothing yet, and 1 checkpoint waits (")
    drain(Uploader(run))
    found = describe_mirror(run, config)
    assert mirror_text(found) == f"{folder_url} has up to step 10, and nothing waits"


def test_a_problem_of_the_mirror_is_an_alert_and_its_end_is_none(folder_url, tmp_path):
    told = tmp_path / "told"
    command = f"logging.alerts.command=[tee,-a,{told}]"
    run = mirrored_run(tmp_path / "run", folder_url, command)
    with EventWriter(run.events, 1) as events:
        events.write("mirror", problem="it is full")
        events.write("mirror", problem="")
    ensure_folder(run.companion(ALERTS).folder)
    Alerter(run).send()
    alert = json.loads(told.read_text())
    assert alert["kind"] == "failure"
    assert alert["text"].endswith("do not reach the mirror, and stay on this disk: it is full")
