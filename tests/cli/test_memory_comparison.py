"""`estimate-memory` of several configurations, and its chart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.errors import ExitCode

LARGE = ["estimate-memory", "recipe=7b-zero3", "hardware=8xa100-80g"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_several_values_are_compared_each_with_its_own_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*LARGE, "zero_stage=2,3", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["configurations"]
    assert [item["values"] for item in compared] == [{"zero_stage": "2"}, {"zero_stage": "3"}]
    peaks = [item["budget"]["device_peak_bytes"] for item in compared]
    assert peaks[0] > peaks[1]
    for stage, peak in zip((2, 3), peaks, strict=True):
        assert run([*LARGE, f"zero_stage={stage}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["device_peak_bytes"] == peak
    assert run([*LARGE, "zero_stage=2,3"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("llama-7b (6.74 B parameters) on 8xa100-80g\n")
    assert all(f"{peak / 2**30:.2f}" in table for peak in peaks)


def test_the_first_line_says_what_is_planned_also_without_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["estimate-memory", "hardware=2xcpu"]) in (0, 3)
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("tiny-llama (772 k parameters) on 2xcpu, sequences of 1,024 tokens: ")
    assert "ZeRO 1, data 2, micro batch" in first
    assert run(["estimate-memory", "recipe=7b-zero3", "hardware=2x8xh100-80g"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("llama-7b (6.74 B parameters) on 2x8xh100-80g, sequences of 4,096")
    assert first.count("data 16") == 1


def test_one_that_is_not_legal_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*LARGE, "zero_stage=3,7"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"zero_stage=3 .*fits", table)
    assert re.search(r"zero_stage=7 .*no option '7'", table)


def test_the_chart_shows_each_configuration_phase_and_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*LARGE, "zero_stage=2,3", "--plot", "memory.html"]) == 0
    assert capsys.readouterr().err.endswith("\nwrote memory.html\n")
    page = (tmp_path / "memory.html").read_text()
    # matplotlib draws text as shapes, and says in a comment which text it was.
    for text in ("zero_stage=2", "zero_stage=3", "optimizer states", "capacity", "load", "fits"):
        assert f"<!-- {text} -->" in page, text


def test_a_chart_of_one_goes_with_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*LARGE, "--plot", "memory.png"]) == 0
    assert "80.00: fits" in capsys.readouterr().out
    assert Path("memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_that_does_not_fit_is_drawn_and_the_exit_code_stays() -> None:
    too_large = ["estimate-memory", "recipe=7b-zero3", "hardware=1xrtx-4090-24g"]
    assert run([*too_large, "--plot", "memory.svg"]) == ExitCode.does_not_fit
    assert Path("memory.svg").exists()


@pytest.mark.parametrize("values", ["31", "31,33"])
def test_nothing_to_draw_is_an_error_that_says_why(
    values: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["estimate-memory", "recipe=tiny", f"training.global_batch_size={values}"]
    assert run([*arguments, "--plot", "memory.png"]) == ExitCode.bad_input
    assert "31" in capsys.readouterr().err
    assert not Path("memory.png").exists()


def test_a_table_of_nothing_legal_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*LARGE, "zero_stage=7,8"]) == ExitCode.bad_input
    assert "no option '8'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plot", "memory.pgn"], "hint: memory.png"),
        (["--plot", "charts/memory.png"], "hint: mkdir -p charts"),
        (["--measure", "--plot", "memory.png"], "leave out --plot"),
        (["--measure", "--exact"], "leave out --plot"),
        (["--force"], "there is no --measure"),
    ],
)
def test_options_without_effect_are_refused_before_any_work(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*LARGE, *arguments]) == ExitCode.bad_input
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
