"""The message about a callback's error, as the launch shows it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainctl.errors import TrainctlError
from trainctl.options.callbacks import Callback
from trainctl.runs.failures import error_line
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import Request, file_request
from trainctl.train.callbacks.context import Journal, RankContext, StepState
from trainctl.train.callbacks.order import CallbackEntry, Callbacks


class Failing(Callback):
    def after_load(self, state: Any) -> None:
        json.dumps(1j)


def test_the_launch_names_callback_hook_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainctl.train.callbacks.order.RankContext", lambda *_, **__: None)
    session: Any = SimpleNamespace(
        process=None,
        engine=SimpleNamespace(times=SimpleNamespace(plain_part=lambda name: nullcontext())),
    )
    entry = CallbackEntry(name="failing", callback=Failing(), is_users=True)
    journal: Any = None
    runner = Callbacks([entry], session, StepState(3), journal)
    with pytest.raises(TrainctlError) as caught:
        runner.restore({})
    log = tmp_path / "rank.log"
    log.write_text(f"{capsys.readouterr().err}error: {caught.value.message}\n")
    assert "Traceback" in log.read_text()
    error = error_line(log)
    assert error.startswith("the callback failing failed in after_load at step 3: TypeError")
    assert f"{__file__}:24" in error


@pytest.mark.parametrize("is_alone", [True, False])
def test_whether_to_go_on_is_agreed_unless_the_first_rank_is_alone(
    tmp_path: Path, is_alone: bool
) -> None:
    run, asked = RunPaths(tmp_path), []

    def any_rank(flag: bool) -> bool:
        asked.append(flag)
        return flag

    process = SimpleNamespace(rank=0, world_size=2, device=None, is_first=True, any=any_rank)
    gradients = SimpleNamespace(are_visible=True)
    session: Any = SimpleNamespace(
        plan=None, shapes={}, run=run, process=process, gradients=gradients
    )
    journal = Journal(session, run, 1, None, None)
    context = RankContext(
        "mine", session, StepState(1), journal, collectives=False, is_alone=is_alone
    )
    assert not context.should_stop() and not context.was_stopped
    file_request(run, Request.stop)
    assert context.should_stop() and context.should_stop() and context.was_stopped
    assert asked == ([] if is_alone else [False, True]), "once agreed, nobody is asked again"
