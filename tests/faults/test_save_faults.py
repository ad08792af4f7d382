"""Kills inside a save, a disk that is full, and checkpoints and pointers that were damaged."""

import os
import resource
import shutil
import subprocess
from contextlib import suppress

import pytest
from struck import CONFIG, STEPS

from trainctl.runs.checkpoints import checkpoint_name

pytestmark = pytest.mark.slow

PHASES = (
    ("fragment", 1, True),
    ("rotation", 0, False),
)
"""Interrupted saves: the phase, the rank, and whether the save is asynchronous.

`tests/train/test_saver.py` interrupts each phase, the rename included, in both ways.
"""


def test_kill_9_before_and_after_a_save_counts(struck, undisturbed):
    """Each phase in turn strikes the same run, at the second save after its resume."""
    overrides = (*CONFIG, "checkpoint.keep=1")
    saved = 0
    for phase, rank, is_behind in PHASES:
        step = saved + 20
        fault = f"phase:{phase}:{rank}:{step}"
        how = f"checkpoint.asynchronous={str(is_behind).lower()}"
        launcher = struck.launch(*overrides, how, TRAINCTL_FAULT=fault, **struck.preloaded)
        said = struck.finish(launcher, 137, f"rank {rank} (node 0", "was killed by SIGKILL")
        failure = struck.events("failure")[-1]
        assert (failure["rank"], failure["cause"], failure["signal"]) == (rank, "killed", "SIGKILL")
        if phase == "rotation":
            assert struck.saved[-1] == step, f"{fault}: it was committed\n{said}"
        else:
            assert struck.saved == [step - 10], f"{fault}: it was not committed\n{said}"
        assert f"continues from step {struck.saved[-1]:,}" in said, fault
        saved, overrides = struck.saved[-1], ()
    struck.complete(undisturbed)
    names = {path.name for path in struck.paths.checkpoints.iterdir()}
    assert names == {"latest", checkpoint_name(STEPS)}, "cut saves and deletions are cleared away"


@pytest.fixture
def small_disk(struck):
    """Disk of 16 MB, mounted as the run's directory."""
    struck.root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(struck.root)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield struck.root
    struck.close()
    subprocess.run(["umount", "--lazy", str(struck.root)], check=True)


def fill(path, *, leaving):
    """Write the file until its disk has so many bytes left."""
    # The run may be quicker. Without a buffer, whose rest would fail again when it is closed.
    with suppress(OSError), path.open("wb", buffering=0) as stream:
        stream.write(bytes(shutil.disk_usage(path.parent).free - leaving))


def test_a_disk_that_is_full_and_a_file_that_cannot_grow(struck, undisturbed, small_disk):
    """The same run meets three limits in turn: room for some checkpoints, room for no record, a
    quota.
    """
    filler = small_disk / "checkpoints" / "filler"
    filler.parent.mkdir()
    fill(filler, leaving=1_200_000)
    launcher = struck.launch(*CONFIG, "checkpoint.keep=100", **struck.preloaded)
    struck.finish(launcher, 4, "the checkpoint could not be saved", "are free", "disk full")
    assert struck.saved in ([10, 20], [10, 20, 30]), "those that found room stay"
    assert not list(struck.paths.checkpoints.glob(".*.tmp")), "the failed save is cleared away"
    filler.unlink()

    # Neither ranks nor agent can say what happened: their logs are on that disk too.
    done = struck.steps_done
    launcher = struck.launch("checkpoint.keep=3", **struck.preloaded)
    struck.wait_for_step(done + 12)
    fill(filler, leaving=0)
    assert struck.steps_done < STEPS, "the run ended before its disk was full"
    said = struck.finish(launcher, 4)
    assert "No space left on device" in said or "disk full" in said
    filler.unlink()

    # A write that fails half way, where the space seemed to be there (a quota, ulimit -f).
    done = struck.steps_done
    launcher = struck.launch()
    struck.wait_for_step(done + 3)
    limit = 20_000
    resource.prlimit(struck.rank(1), resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    kept = struck.saved
    struck.finish(launcher, 4, "rank 1", "File too large")
    assert struck.saved[0] == kept[0], "what was committed stays"
    assert not list(struck.paths.checkpoints.glob(".*.tmp")), "the failed save is cleared away"
    struck.complete(undisturbed)


def newest_fragment_file(struck):
    return next(
        (struck.paths.checkpoints / checkpoint_name(struck.saved[-1])).glob("*.safetensors")
    )


def flip_a_byte(struck):
    file = newest_fragment_file(struck)
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    return file


def truncate(struck):
    file = newest_fragment_file(struck)
    os.truncate(file, file.stat().st_size - 8)
    return file


def lose(struck):
    file = newest_fragment_file(struck)
    file.unlink()
    return file


def test_damaged_checkpoints_are_passed_over_and_the_pointer_is_never_trusted(struck, undisturbed):
    """The newest checkpoint is damaged three times, the pointer twice; the next older one is
    resumed.
    """
    first = struck.launch(*CONFIG, "training.stop_after_steps=35", **struck.preloaded)
    struck.finish(first, 0)
    assert struck.saved == [20, 30, 35]
    shutil.copytree(struck.paths.checkpoints / checkpoint_name(20), struck.root / "x")
    pointer = struck.paths.checkpoints / "latest"
    blows = (
        (flip_a_byte, "step-00009999\n", 55),
        (truncate, "../x\n", 75),
        (lose, None, STEPS),
    )
    for damage, text, stop in blows:
        newest, intact = struck.saved[-1], struck.saved[-2]
        file = damage(struck)
        if text is None:
            pointer.unlink()
        else:
            pointer.write_text(text)
        again = struck.launch(f"training.stop_after_steps={stop}", **struck.preloaded)
        said = struck.finish(again, 0)
        assert "passed over" in said and file.name in said, said
        assert checkpoint_name(newest) in said, said
        assert struck.events("start")[-1]["resumed_from"] == checkpoint_name(intact)
        assert pointer.read_text() == f"{checkpoint_name(stop)}\n"
    assert struck.curve == undisturbed
