"""`trainctl data prepare` and `data show --dropped`: what is left out of a mixture, and why."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from trainctl.cli.console import print_table
from trainctl.cli.data_plan import STATISTICS
from trainctl.cli.main import run
from trainctl.errors import ExitCode

RECIPE = """\
# Two sources, and what is asked of them.
defaults: [tiny, _self_]
data:
  dedup: minhash
  decontaminate: [bench.txt]
  sources:
    code:  {paths: [code], weight: 0.7, held_out_fraction: 0}
    prose:
      paths: [prose.jsonl]
      weight: 0.3
      held_out_fraction: 0
      filters: {gopher_quality: {min_stop_words: null}}
"""


@pytest.fixture(autouse=True)
def _corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    draw = random.Random(0)
    words = [f"word{number}" for number in range(3000)]
    texts = [" ".join(draw.choices(words, k=400)) for _ in range(20)]
    for name in ("recipes", "code"):
        (tmp_path / name).mkdir()
    (tmp_path / "recipes" / "mix.yaml").write_text(RECIPE)
    (tmp_path / "bench.txt").write_text(" ".join(texts[7].split()[20:60]))
    for number in range(10):
        (tmp_path / "code" / f"{number}.txt").write_text(texts[number])
    prose = [*texts[10:], texts[3], texts[4].replace("word", "other", 2), "a few words"]
    lines = (json.dumps({"text": text}) + "\n" for text in prose)
    (tmp_path / "prose.jsonl").write_text("".join(lines))


def test_what_is_left_out_is_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "show", "mix", "--dropped"]) == 0
    assert "what stays | word" in capsys.readouterr().out, "it has been prepared on the way"
    assert run(["data", "prepare", "mix"]) == 0
    out = capsys.readouterr().out
    assert "code: 1 of 10 documents to train on are left out" in out
    assert "prose: 3 of 13 documents to train on are left out" in out
    assert "  contamination: 1 documents" in out and "  near: 1 documents" in out
    assert run(["data", "show", "mix", "--dropped"]) == 0
    shown = capsys.readouterr().out
    assert "code/7.txt\n    contamination: 28 n-grams of held-out texts" in shown
    assert "prose.jsonl:11\n    exact: the same text as " in shown
    assert "what stays | word" in shown
    assert run(["data", "show", "mix", "--dropped", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    code, prose = told["sources"]
    assert (code["documents"], code["stay"]) == (10, 9)
    went = {name: tally["documents"] for name, tally in prose["reasons"].items()}
    assert went["gopher_quality.min_words"] == went["exact"] == went["near"] == 1
    likes = {row["reason"]: Path(row["like"]).name for row in told["examples"] if row["like"]}
    assert likes == {"exact": "3.txt", "near": "4.txt"}
    assert run(["data", "prepare", "mix", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == told["sources"]


def test_invalid_requests_are_reported_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        (tmp_path / "code" / f"{number}.py").write_text("x = 1\n" * 500)
    asked = [
        "data.decontaminate=[nothing/*.jsonl]",
        "data.sources.code.paths=[code/*.py]",
        "data.sources.code.filters={fineweb: {}, words: {file: none.txt}}",
        "data.sources.prose.filters.function.call=no_such_module:score",
    ]
    assert run(["validate", "mix", *asked]) == ExitCode.bad_input
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert "no file matches 'nothing/*.jsonl'" in said
    assert "none.txt does not exist" in said
    assert "there is no module no_such_module" in said
    assert "3 of 3 files end in .py: nearly all code goes" in said


def test_what_a_launch_refuses_is_not_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "data.dedup_threshold=0.1",
        "data.dedup_precedence=[cod]",
        "data.decontaminate=[held_out]",
        "data.sources.prose.filters.gopher_quality={min_words: 40, max_words: 10}",
        "data.sources.prose.weight=0.4",
    ]
    assert run(["data", "prepare", "mix", *asked]) == ExitCode.bad_input
    captured = capsys.readouterr()
    for rule in ("TC340", "TC353", "TC354", "TC355", "TC356"):
        assert f"error[{rule}]" in captured.err
    assert "set by: data.dedup_threshold=0.1" in captured.err
    assert not captured.out and not (tmp_path / "cache").exists()


def test_without_anything_asked_nothing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "show", "tiny", "--dropped"]) == ExitCode.bad_input
    assert "nothing is asked of the documents" in capsys.readouterr().err
    assert run(["data", "show", "runs/none"]) == ExitCode.bad_input
    assert "--samples 12,40-44" in capsys.readouterr().err


def test_what_the_sources_are_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "stats", "mix", "data.dedup=none", "--plot", "corpus.svg"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("source") and "\nprose" in shown
    assert Path("corpus.svg").stat().st_size > 1000
    assert run(["data", "stats", "mix", "data.dedup=none", "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert sources["code"]["documents"] == 9 and sources["prose"]["documents"] == 12
    assert sources["code"]["copies"] == 0 and sources["prose"]["copies"] == 1
    assert sources["code"]["bytes_per_token"] == pytest.approx(1, abs=0.01)


def test_a_wide_table_in_a_file_is_cut_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(STATISTICS, [["notes", *["10,983,038,000"] * 10]], right=range(1, 11), wraps=False)
    shown = capsys.readouterr().out
    assert "…" not in shown and shown.count("10,983,038,000") == 10 and shown.count("\n") == 2


def test_what_lies_elsewhere_is_neither_counted_nor_written_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["data", "stats", "tiny", "data=stream", "data.url=gone"]) == ExitCode.bad_input
    assert "the text of data lies elsewhere" in capsys.readouterr().err
    asked = ["data=stream", "data.url=gone", "--to", "here"]
    assert run(["data", "prepare", "tiny", *asked]) == ExitCode.bad_input
    assert "the text of data lies elsewhere already" in capsys.readouterr().err


def test_preparation_says_what_bad_text_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "prose.jsonl").open("a") as file:
        file.write('{"text": \n')
    asked = ["data.dedup=none", "data.sources.prose.on_bad_text=skip"]
    assert run(["data", "prepare", "mix", *asked]) == 0
    told = capsys.readouterr().out
    assert "prose: bad text: 1 document left out; the first: " in told and ":14: not JSON" in told
