"""All of it at once: what is kept is not made again, whatever was killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from planted_corpus import parts_of, texts_of_python

from trainctl.data.executors import LocalExecutor
from trainctl.data.quality import near_duplicates
from trainctl.data.quality.batches import Entry
from trainctl.data.quality.columns import PartToMeasure
from trainctl.data.quality.decide import select_documents
from trainctl.data.quality.measurement import WantedColumns, measure_all
from trainctl.data.quality.selection import Contamination, Rules
from trainctl.data.text_search import describe_examples
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.filter.gopher_quality import GopherQualityConfig

CHUNKS = 12


def parts() -> list[PartToMeasure]:
    """Python's documentation in parts, with copies."""
    texts = texts_of_python(20)
    prose = [*texts["prose"][:60], *texts["prose"][:10]]
    every = {("prose", f"{number:02d}"): prose[number::CHUNKS] for number in range(CHUNKS)}
    every["code", "0"] = [*texts["code"], *prose[20:25], texts["code"][1] + "\nat its end"]
    return parts_of(every)


RULES = Rules(
    near=0.8,
    substring=0.9,
    filters={"prose": {"gopher_quality": GopherQualityConfig()}},
    contamination=Contamination(),
)


def held_out() -> list[Entry]:
    words = texts_of_python(20)["code"][3].split()
    return [Entry(0, " ".join(words[len(words) // 2 :][:40]))]


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in the folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_another_threshold_makes_only_the_decision_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(rules: Rules) -> np.ndarray:
        return select_documents(
            parts(), tmp_path, rules, precedence=["prose"], held_out=held_out()
        ).why

    first = once(RULES)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("found already")

    monkeypatch.setattr(near_duplicates, "find_identical_texts", refuse)
    assert once(RULES).tolist() == first.tolist()
    keys = replace(RULES.filters["prose"]["gopher_quality"], min_words=500)
    more = once(replace(RULES, near=0.9, filters={"prose": {"gopher_quality": keys}}))
    assert (more > 0).sum() > (first > 0).sum()
    changed = {path.parent.name for path, was in before.items() if path.stat().st_mtime_ns != was}
    assert changed <= {".held_out", ".selection"}
    with pytest.raises(AssertionError, match="found already"):
        once(replace(RULES, near=0.7))


def test_what_went_is_shown(tmp_path: Path) -> None:
    every = parts()
    selection = select_documents(every, tmp_path, RULES, precedence=["prose"], held_out=held_out())

    def text(source: str, part: str, number: int) -> tuple[str, str]:
        (found,) = (each for each in every if (each.source, each.name) == (source, part))
        where = f"{source}/{part} #{number}"
        return where, next(entry.text for entry in found.read() if entry.number == number)

    rows = [row for of in selection.examples.values() for row in describe_examples(of, text)]
    assert {row.reason.partition(".")[0] for row in rows} >= {"exact", "near", "contamination"}
    for row in rows:
        assert row.document
        if row.reason in ("exact", "near"):
            assert row.other
        if row.reason == "exact":
            assert row.excerpt == row.other
            assert row.why.startswith("the same text as ")
    (found,) = (row for row in rows if row.reason == "near")
    assert re.fullmatch(r"nearly the same as code/0 #1: Jaccard index 0\.[89]\d", found.why)


def test_a_kill_at_any_moment_changes_nothing(tmp_path: Path) -> None:
    """The final files are byte for byte those of an undisturbed process."""
    script = (
        "import sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from test_quality_judge import RULES, held_out, select_documents, parts\n"
        "print('begun', flush=True)\n"
        "select_documents(parts(), Path(sys.argv[1]), RULES, precedence=['prose'],\n"
        "                 held_out=held_out())\n"
    )
    command = [sys.executable, "-c", script]
    here = str(Path(__file__).parent)
    draw = random.Random(5)
    select_documents(parts(), tmp_path / "whole", RULES, precedence=["prose"], held_out=held_out())
    disturbed = tmp_path / "disturbed"
    for _ in range(4):
        process = subprocess.Popen([*command, str(disturbed), here], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    select_documents(parts(), disturbed, RULES, precedence=["prose"], held_out=held_out())
    assert files(disturbed) == files(tmp_path / "whole")


def test_a_process_that_is_killed_is_reported_in_words(tmp_path: Path) -> None:
    """The kernel kills a process so when memory runs out."""
    parts = [PartToMeasure("a", str(number), "", partial(os._exit, 9)) for number in range(2)]
    with pytest.raises(TrainctlError, match="was killed") as raised:
        measure_all(parts, tmp_path, WantedColumns(near=False), executor=LocalExecutor(2))
    assert raised.value.exit_code is ExitCode.environment
