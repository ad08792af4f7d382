"""Nothing in a manifest is believed: whatever is done to one, it is refused in words or still true.

Pure: a checkpoint of two small files, read many times.
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import save

from trainctl.config.schema import RunConfig
from trainctl.runs import checkpoints
from trainctl.runs.directory import create_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import DIGEST, LARGEST_MANIFEST, digest, read_manifest, verify

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, 10**400, 0.5, -0.0, 1e308),
    *("", "10", "step", "../x", "/etc/passwd", "rank-00000.safetensors", "\x1b[31m", "\ud800"),
    *([], [None], [[]], ["master"], [1, 2], [4, 0, 2], {}, {"a": None}, {"name": "x", "bytes": 1}),
)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return create_run(RunConfig(), run_dir=tmp_path / "run")


@pytest.fixture
def path(run: RunPaths) -> Path:
    return save(
        run,
        10,
        files=2,
        metrics={"loss": 2.5},
        patience={"best": 2.5, "best_step": 10, "evaluations_since": 0},
        loss_scale={
            "cur_scale": 8.0,
            "cur_iter": 3.0,
            "last_overflow_iter": -1.0,
            "cur_hysteresis": 2.0,
        },
        stability={"loss": [2.5, 10], "norm": [1.0, 10], "in_a_row": 0, "bad_step": 0},
        norms=[1.0, 2.0],
        layout={"zero_stage": 1, "data": 2},
    )


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


def put(path: Path, manifest: dict[str, Any], *, checksum: bool = True) -> None:
    """Write a manifest with the checksum that it should have."""
    if checksum:
        fields = {key: value for key, value in manifest.items() if key != DIGEST}
        manifest = {**fields, DIGEST: digest(fields)}
    (path / "manifest.json").write_text(json.dumps(manifest))


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    if place:
        yield place
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from places(item, (*place, key))


def parent(document: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        document = document[key]
    return document


def test_whatever_is_changed_gives_words_or_an_intact_checkpoint(run: RunPaths, path: Path) -> None:
    """Each value is deleted, and replaced by others, with the checksum made to match."""
    draw = random.Random(5)
    original = content(path)
    run_id = checkpoints.manifest_run_id(run)
    refused = 0
    for place in list(places(original)):
        for value in (..., *draw.sample(VALUES, 9)):
            changed = copy.deepcopy(original)
            where = parent(changed, place)
            if value is ...:
                del where[place[-1]]
            else:
                where[place[-1]] = value
            put(path, changed)
            problems = verify(path, run_id)
            assert all(isinstance(problem, str) and problem.isprintable() for problem in problems)
            refused += bool(problems)
            if not problems:
                assert_consistent(read_manifest(path, run_id))
    assert refused > 600


def assert_consistent(manifest: dict[str, Any]) -> None:
    """Assert what readers of a manifest rely on without another check."""
    assert manifest["step"] == 10 and manifest["files"] and manifest["fragments"]
    assert "{:.4f}".format(*manifest["metrics"].values() or [0.0])
    for name, shape in manifest["shapes"].items():
        parts = [f for f in manifest["fragments"] if f["parameter"] == name]
        assert sum(part["numel"] for part in parts) >= (shape[0] if shape else 1)


def test_any_byte_and_any_value_under_the_old_checksum_is_seen(path: Path) -> None:
    """Only the order of keys and the whitespace between them may change."""
    draw = random.Random(13)
    original = content(path)
    for place in list(places(original)):
        changed = copy.deepcopy(original)
        where = parent(changed, place)
        before = where[place[-1]]
        where[place[-1]] = draw.choice([value for value in VALUES if value != before])
        put(path, changed, checksum=False)
        assert verify(path), place
    text = json.dumps(original, indent=1)
    for _ in range(200):
        at = draw.randrange(len(text))
        flipped = text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :]
        (path / "manifest.json").write_text(flipped)
        assert verify(path) or json.loads(flipped) == original


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({DIGEST: ...}, "checksum"),
        ({"format": 0}, "format is 0"),
        ({"format": "2"}, "format is '2'"),
        ({"step": -10}, "step is -10"),
        ({"step": "10"}, "step is '10'"),
        ({"step": 11}, "its manifest is of step 11"),
        ({"metrics": None}, "metrics is None"),
        ({"fragments": []}, "parameter.0 is not all there: it has no fragment"),
        ({"files": []}, "its files are none"),
        ({"shapes": {}}, "it has no parameter"),
        ({"run": "another"}, "of another run (model.initial_weights"),
        ({"run": ...}, "run is None"),
        ({"model": ...}, "model is None"),
    ],
)
def test_what_is_wrong_is_reported(
    run: RunPaths, path: Path, changes: dict[str, Any], problem: str
) -> None:
    manifest = {**content(path), **changes}
    manifest = {key: value for key, value in manifest.items() if value is not ...}
    put(path, manifest, checksum=DIGEST not in changes)
    newest, (found,) = checkpoints.newest_checkpoint(run)
    assert newest is None and problem in found and found.startswith("step-00000010: ")


def test_half_of_a_parameter_or_a_place_outside_its_file_is_none(path: Path) -> None:
    original = content(path)
    put(path, {**original, "fragments": original["fragments"][1:]})
    assert "its elements are there up to 0 of 4" in verify(path)[0]
    put(path, {**original, "fragments": original["fragments"][:-1]})
    assert "parameter.1 is not all there: its elements are there up to 2 of 4" in verify(path)[0]
    changed = copy.deepcopy(original)
    changed["fragments"][0]["shard"] = [2, 0, 1]
    put(path, changed)
    assert "its shards do not make it up" in verify(path)[0]
    changed = copy.deepcopy(original)
    changed["fragments"][0]["offset"] = 3
    put(path, changed)
    assert "has no master/0 of 5 elements (parameter.0)" in verify(path)[0]


def test_another_name_or_another_run_is_refused_and_a_moved_run_is_not(
    run: RunPaths, path: Path, tmp_path: Path
) -> None:
    other = create_run(RunConfig(), run_dir=tmp_path / "other")
    moved = path.rename(other.checkpoints / path.name)
    assert "of another run" in checkpoints.newest_checkpoint(other)[1][0]
    assert verify(moved) == []  # to take weights from
    moved.rename(path)
    run.root.rename(tmp_path / "moved")
    newest, _ = checkpoints.newest_checkpoint(RunPaths(tmp_path / "moved"))
    assert newest is not None and newest.step == 10
    renamed = newest.path.rename(newest.path.with_name("step-00000020"))
    assert verify(renamed) == ["step-00000020: its manifest is of step 10"]


def test_the_first_format_is_read_but_not_without_its_checksum(run: RunPaths, path: Path) -> None:
    """It did not say which run and model it is of."""
    later = ("run", "model", "weights_only", DIGEST)
    old = {key: value for key, value in content(path).items() if key not in later}
    put(path, old | {"format": 1})
    newest, _ = checkpoints.newest_checkpoint(run)
    assert newest is not None and newest.step == 10
    put(path, old | {"format": 1, "model": {}})
    assert checkpoints.newest_checkpoint(run)[0] is None
    put(path, old | {"format": 1}, checksum=False)
    assert checkpoints.newest_checkpoint(run)[0] is None


def test_manifests_that_are_no_file_or_too_large_are_refused(run: RunPaths, path: Path) -> None:
    file = path / "manifest.json"
    good = file.read_bytes()
    started = time.monotonic()
    file.unlink()
    os.mkfifo(file)
    assert "manifest is not readable (it is no file)" in verify(path)[0]
    file.unlink()
    file.mkdir()
    assert "not readable" in verify(path)[0]
    file.rmdir()
    with file.open("wb") as stream:
        stream.truncate(LARGEST_MANIFEST + 1)
    assert f"it has {LARGEST_MANIFEST + 1:,} bytes" in verify(path)[0]
    for deep in ('{"a":' * 100_000, "[" * 100_000, '{"step": 1e999}', '{"step": NaN}'):
        file.write_text(deep)
        assert verify(path)
    file.write_bytes(good)
    weights = path / "rank-00001.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    assert verify(path) == ["step-00000010: rank-00001.safetensors is missing"]
    assert time.monotonic() - started < 5
