from __future__ import annotations

import signal
from pathlib import Path

import pytest

from trainctl.runs import failures

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("no: good")
ValueError: no: good
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("all is well\n", ""),
        (TRACEBACK, "ValueError: no: good"),
        (TRACEBACK + "later talk\n", "ValueError: no: good"),
        (
            TRACEBACK.replace("no: good", "first")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + TRACEBACK,
            "ValueError: no: good",
        ),
        (
            TRACEBACK + "Exception ignored in: <function f>\n" + TRACEBACK.replace("no", "late"),
            "ValueError: no: good",
        ),
        (
            "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines()),
            "ValueError: no: good",
        ),
        ("Traceback (most recent call last):\n  cut off", ""),
        ("error: first\nerror: the loss is NaN\nhint: lower the rate\n", "the loss is NaN"),
    ],
)
def test_the_line_that_names_the_exception(tmp_path: Path, log: str, error: str) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text(log)
    assert failures.error_line(path) == error


def test_the_tail_of_a_log_is_short_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    assert failures.log_tail(path) == []
    path.write_bytes(b"\xff\xfe\n" * 100_000 + b"x" * 10_000 + b"\nlast\n\n")
    tail = failures.log_tail(path)
    assert len(tail) == failures.TAIL_LINES
    assert tail[-1] == "last" and tail[-2] == "x" * 500 + " [cut]"


def test_how_a_rank_ended_in_words_and_as_an_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text(TRACEBACK)
    killed = failures.describe_exit(-9, path)
    assert (killed["signal"], killed["exit_code"]) == ("SIGKILL", None)
    assert "out of memory" in killed["hint"]
    raised = failures.describe_exit(1, path)
    assert raised["message"] == "ended with exit code 1: ValueError: no: good"
    event = {"rank": 3, "node": 0, "host": "h", "pid": 7, **killed}
    assert failures.describe_failure(event) == "rank 3 (node 0, h, process 7) was killed by SIGKILL"
    assert failures.describe_failure({"rank": None, "message": "the corpus is empty"}) == (
        "the corpus is empty"
    )
    assert [failures.exit_code(code) for code in (-9, -15, 1, 77)] == [137, 143, 6, 6]
    assert failures.signal_name(35) == "signal 35"


def test_what_native_code_said_before_it_aborted_is_in_the_tail(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    frames = "".join(f'  File "frame.py", line {n} in f\n' for n in range(40))
    said = "terminate called after throwing an instance of 'std::out_of_range'"
    log.write_text(
        f"step 1\n{said}\nFatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
        f"{frames}\nExtension modules: numpy\n"
    )
    tail = failures.describe_exit(-6, log)["log_tail"]
    assert said in tail and len(tail) <= failures.TAIL_LINES
    assert '  File "frame.py", line 0 in f' in tail and "Extension modules: numpy" not in tail


def test_an_abort_after_an_error_is_that_error(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("terminate called\n")
    assert failures.effective_return_code(-signal.SIGABRT, path) == -signal.SIGABRT
    path.write_text(TRACEBACK + "terminate called\n")
    assert failures.effective_return_code(-signal.SIGABRT, path) == 1
    assert failures.effective_return_code(-signal.SIGKILL, path) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        ("RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:9354.", True),
        ("RuntimeError: [pair.cc:538] Read error [127.0.0.1]: Connection reset by peer", True),
        ("torch.distributed.DistBackendError: NCCL error: remote process exited", True),
        ("ValueError: the loss is not finite", False),
        ("torch.OutOfMemoryError: CUDA out of memory.", False),
    ],
)
def test_a_lost_peer_is_a_consequence(error: str, is_consequence: bool) -> None:
    assert failures.is_lost_peer(error) is is_consequence


@pytest.mark.parametrize(
    "said",
    [
        "AssertionError: Not sure how to proceed, we were given deepspeed configs in the deepspeed "
        "arguments and deepspeed.initialize() function call",
        "t.py: error: unrecognized arguments: --deepspeed_config /r/attempts/1/ds_config.json",
        "ValueError: Some specified arguments are not used by the HfArgumentParser: "
        "['--deepspeed_config', '/r/attempts/1/ds_config.json']",
        "Error: No such option: --deepspeed_config",
    ],
)
def test_a_script_that_refuses_the_json_gets_the_key_as_a_hint(tmp_path: Path, said: str) -> None:
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\n  File ...\n{said}\n")
    hint = failures.describe_exit(2, tmp_path / "log", uses_trainctl_codes=False)["hint"]
    assert hint.startswith("script_config_flag=null")
