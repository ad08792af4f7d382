"""Tests of the order of rules, of the documents kept, and of what is refused."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from planted_corpus import entries, parts_of

from trainctl.data.quality import near_duplicates as near
from trainctl.data.quality.batches import Entry
from trainctl.data.quality.columns import Columns, MeasuredCorpus, PartToMeasure, columns_folder
from trainctl.data.quality.decide import decide_removals
from trainctl.data.quality.measurement import WantedColumns, measure_all, measure_part
from trainctl.data.quality.near_duplicates import find_identical_texts, near_pairs
from trainctl.data.quality.selection import Contamination, HeldOut, Rules, Selection, write_held_out
from trainctl.data.quality.shuffle import read_kept, search_in
from trainctl.errors import TrainctlError
from trainctl.options.filter.function import FunctionConfig

Document = tuple[str, str, int]


def text(*words: int) -> str:
    return " ".join(f"w{each}" for each in words)


def changed(words: list[int], share: float, draw: random.Random) -> list[int]:
    return [draw.randrange(10**9) if draw.random() < share else word for word in words]


def decide(
    folder: Path,
    texts: dict[Document, list[str]],
    rules: Rules,
    precedence: list[str],
    held_out: list[str] | None = None,
) -> dict[Document, str]:
    """Why each document goes; it is left out of the result if it stays."""
    parts = parts_of(texts, **rules.filters)
    if held_out is not None:
        write_held_out(folder / "held_out", entries(held_out))
    wanted = WantedColumns(held_out=folder / "held_out" if held_out is not None else None)
    measure_all(parts, folder, wanted)
    corpus = MeasuredCorpus.load(parts, folder, precedence)
    with search_in(corpus, folder / "scratch") as search:
        same = find_identical_texts(search)
        pairs = near_pairs(search, same, rules.near) if rules.near else None
    selection = decide_removals(corpus, rules, same, pairs)
    return _as_reasons(corpus, selection)


def _as_reasons(corpus: MeasuredCorpus, selection: Selection) -> dict[Document, str]:
    found = {}
    for document in np.flatnonzero(selection.why).tolist():
        part, number = corpus.where(document)
        found[part.source, part.name, number] = selection.reasons[selection.why[document] - 1]
    return found


@pytest.mark.parametrize("first", ["one", "two"])
def test_the_first_source_s_copy_stays(tmp_path: Path, first: str) -> None:
    draw = random.Random(1)
    words = list(range(200))
    texts = {
        ("one", "a"): [text(*words), text(5)],
        ("two", "a"): [text(*changed(words, 0.01, draw)), text(5)],
    }
    other = {"one": "two", "two": "one"}[first]
    found = decide(tmp_path, texts, Rules(near=0.7), [first, other])
    assert found == {(other, "a", 0): "near", (other, "a", 1): "exact"}


def test_what_a_filter_removes_keeps_no_copy_from_staying(tmp_path: Path) -> None:
    """Nor what is nearly the same: the score of the first one is too high."""
    draw = random.Random(1)
    words = list(range(200))
    near_copy = text(*changed(words, 0.01, draw)) + " longer by a few words than the first of all"
    texts = {
        ("one", "a"): [near_copy, text(5), text(7)],
        ("two", "a"): [text(*words), text(5), text(*words)],
    }
    keys = FunctionConfig(call="builtins:len", minimum=3.0, maximum=float(len(near_copy) - 1))
    rules = Rules(near=0.7, filters={"one": {"function": keys}})
    found = decide(tmp_path, texts, rules, ["one", "two"])
    assert found == {
        ("one", "a", 0): "function.maximum",
        ("one", "a", 1): "function.minimum",
        ("one", "a", 2): "function.minimum",
        ("two", "a", 2): "exact",
    }


def test_a_chain_of_changes_removes_only_what_is_like_something_that_stays(tmp_path: Path) -> None:
    """Each document resembles only its neighbours, so every other one stays."""
    texts = {("one", "a"): [text(*range(at, at + 100)) for at in range(0, 150, 15)]}
    found = decide(tmp_path, texts, Rules(near=0.65), ["one"])
    assert sorted(number for _, _, number in found) == [1, 3, 5, 7, 9]


def test_large_groups_are_compared_in_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(1)
    texts = []
    for base in range(3):
        words = list(range(1000 * base, 1000 * base + 120))
        for _ in range(40):
            place = draw.randrange(120)
            texts.append(text(*words[:place], draw.randrange(10**9), *words[place + 1 :]))
    draw.shuffle(texts)
    found = decide(tmp_path / "rounds", {("one", "a"): texts}, Rules(near=0.8), ["one"])
    assert len(found) == 117
    monkeypatch.setattr(near, "_ALL_PAIRS", 1000)
    assert decide(tmp_path / "all", {("one", "a"): texts}, Rules(near=0.8), ["one"]) == found


def test_boilerplate_of_held_out_texts_does_not_count(tmp_path: Path) -> None:
    """Boilerplate is a passage in many distinct documents: copies count once."""
    licence, leaked = text(*range(20)), text(*range(100, 120))
    texts = {
        ("one", "a"): [f"{licence} {text(each)}" for each in range(1000, 1011)],
        ("one", "b"): [
            leaked,
            f"before {leaked} after",
            *["x " + leaked] * 20,
            text(*range(101, 113)),
        ],
    }
    wanted = Rules(exact=False, contamination=Contamination())
    held_out = [f"{licence} and {leaked}", text(*range(40, 50))]
    found = decide(tmp_path / "ten", texts, wanted, ["one"], held_out)
    assert set(found) == {("one", "b", number) for number in range(22)}
    wanted = Rules(exact=False, contamination=Contamination(max_documents=None))
    assert len(decide(tmp_path / "all", texts, wanted, ["one"], held_out)) == 11 + 22
    wanted = Rules(exact=False, contamination=Contamination(min_ngrams=9))
    assert not decide(tmp_path / "nine", texts, wanted, ["one"], held_out)


def test_a_short_held_out_text_is_looked_for_whole(tmp_path: Path) -> None:
    held_out = write_held_out(tmp_path / "h", entries([text(*range(9)), text(*range(50, 57)), ""]))
    assert (held_out.sizes, held_out.too_short) == ((9,), 2)
    texts = {("one", "a"): [text(7, *range(9), 7), text(*range(8)), text(*range(1, 30))]}
    rules = Rules(contamination=Contamination())
    held = [text(*range(9)), text(*range(50, 57))]
    assert set(decide(tmp_path, texts, rules, ["one"], held)) == {("one", "a", 0)}


def test_another_held_out_text_has_all_measured_again(tmp_path: Path) -> None:
    (part,) = parts_of({("one", "a"): [text(*range(30))]})
    held_out = tmp_path / "held_out"
    keys = []
    for words in (range(13), range(13), range(14)):
        write_held_out(held_out, entries([text(*words)]))
        assert HeldOut.load(held_out).ngrams.size == len(words) - 12
        measure_part(part, tmp_path, WantedColumns(held_out=held_out))
        keys.append(Columns.load(columns_folder(part, tmp_path)).manifest["key"])
    assert keys[0] == keys[1] != keys[2]


def test_an_array_that_is_kept_for_tasks_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with search_in(MeasuredCorpus([]), tmp_path / "scratch") as search:
        monkeypatch.setattr(os, "fsync", synced.append)
        kept = search.keep("ids", np.arange(3))
        assert synced and read_kept(kept).tolist() == [0, 1, 2]
        assert search.keep("ids", np.arange(9)) == kept and len(read_kept(kept)) == 3


class Broken(Exception):
    pass


def broken(after: int) -> list[Entry]:
    def documents() -> object:
        yield from entries([text(*range(50_000))] * after)
        raise Broken

    return documents()  # type: ignore[return-value]


def test_a_part_that_fails_is_not_there(tmp_path: Path) -> None:
    """Finished parts stay."""
    (good,) = parts_of({("one", "a"): ["text"]})
    bad = PartToMeasure("one", "b", "1", partial(broken, 2))
    with pytest.raises(Broken):
        measure_all([good, bad], tmp_path, WantedColumns())
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["a"]
    with pytest.raises(TrainctlError, match="No such file"):
        MeasuredCorpus.load([good, bad], tmp_path)


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [remove, cut])
@pytest.mark.parametrize("file", ["manifest.json", "hash.bin", "sketch.ends.bin"])
def test_damaged_columns_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    (part,) = parts_of({("one", "a"): ["a text of a few words more"]})
    measure_part(part, tmp_path, WantedColumns())
    damage(columns_folder(part, tmp_path) / file)
    if file == "manifest.json" and damage is cut:  # only its last line feed
        MeasuredCorpus.load([part], tmp_path)
        return
    with pytest.raises(TrainctlError, match="no columns of a corpus"):
        MeasuredCorpus.load([part], tmp_path)
