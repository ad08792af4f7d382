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
from trainctl.train.callbacks.context import StepState
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
    assert f"{__file__}:22" in error
