"""A corpus that is collected from this machine's packages and documentation, with copies planted.

Three sources, as a user has them: 10 MB, or as many as TRAINCTL_TEST_CORPUS_MB says. What goes and
was not planted is compared with all that stays, by sets of word 5-grams, without any hashing.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from planted_corpus import edited, five_grams, jaccard

from trainctl.config.compose import compose
from trainctl.config.registry import new_section
from trainctl.data.corpus import build_corpus
from trainctl.data.document_selection import DROPPED
from trainctl.data.tokenizer import ByteTokenizer

MEGABYTES = float(os.environ.get("TRAINCTL_TEST_CORPUS_MB", "10"))
THRESHOLD = 0.8
SHARES = {"code": 0.6, "prose": 0.25, "manuals": 0.15}
"""Share of the megabytes by source. Code fills up what the machine lacks of the others."""


@dataclass
class Collected:
    """The corpus: texts of each source, and which documents were planted, by source and line."""

    texts: dict[str, list[str]]
    copies: set[tuple[str, int]] = field(default_factory=set)
    near: dict[tuple[str, int], float] = field(default_factory=dict)
    contaminated: set[tuple[str, int]] = field(default_factory=set)
    held_out: list[str] = field(default_factory=list)

    def plant(self, source: str, text: str) -> tuple[str, int]:
        self.texts[source].append(text)
        return source, len(self.texts[source]) - 1


def files_of(source: str) -> Iterator[Path]:
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    folders, share = (library, packages, Path(json.__file__).parents[2]), Path("/usr/share")
    if source == "code":
        for folder in folders:
            yield from sorted(folder.rglob("*.py"))
    elif source == "manuals":
        yield from sorted((share / "man").glob("man[1-9]/*"))
    else:
        for folder in (*folders, share, Path(pytest.__file__).parents[1]):
            for ending in ("rst", "md", "txt"):
                yield from sorted(folder.rglob(f"*.{ending}"))


def texts_of(source: str, size: float) -> list[str]:
    """Return distinct texts of 500 to 400,000 characters, up to a total of `size` characters."""
    found: dict[str, None] = {}
    for file in files_of(source):
        try:
            raw = file.read_bytes()
            text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()
        except (OSError, UnicodeDecodeError):
            continue
        if 500 <= len(text) <= 400_000 and text not in found:
            found[text] = None
            size -= len(text)
        if size <= 0:
            break
    return list(found)


def collected() -> Collected:
    draw = random.Random(11)
    size = MEGABYTES * 1e6
    texts = {name: texts_of(name, SHARES[name] * size) for name in ("manuals", "prose")}
    there = sum(map(len, (text for of in texts.values() for text in of)))
    corpus = Collected({"code": texts_of("code", size - there), **texts})
    every = [(name, text) for name, of in corpus.texts.items() for text in of]
    draw.shuffle(every)
    long = [(name, text) for name, text in every if len(five_grams(text)) >= 100]
    count = min(len(long) // 8, 400)
    for name, text in long[:count]:
        corpus.copies.add(corpus.plant(name, text))
    for number, (name, text) in enumerate(long[count : 4 * count]):
        other = edited(text, (0.005, 0.01, 0.02, 0.03)[number % 4], draw)
        corpus.near[corpus.plant(name, other)] = jaccard(five_grams(text), five_grams(other))
    for number, (name, text) in enumerate(long[4 * count : 5 * count]):
        words = [f"held{draw.randrange(10**6)}" for _ in range(60)]
        corpus.held_out.append(" ".join(words))
        if number % 2:
            start = draw.randrange(40)
            middle = len(text) // 2
            leaked = f"{text[:middle]} {' '.join(words[start : start + 20])} {text[middle:]}"
            corpus.contaminated.add(corpus.plant(name, leaked))
    return corpus


def largest_indices(went: list[str], stays: Iterator[str]) -> list[float]:
    """Return the largest Jaccard index of each removed text with any kept text."""
    sets = [five_grams(text) for text in went]
    having: dict[tuple[str, ...], list[int]] = {}
    for number, grams in enumerate(sets):
        for gram in grams:
            having.setdefault(gram, []).append(number)
    largest = [0.0] * len(went)
    for text in stays:
        grams = five_grams(text)
        common = Counter(number for gram in grams for number in having.get(gram, ()))
        for number, both in common.items():
            index = both / (len(grams) + len(sets[number]) - both)
            largest[number] = max(largest[number], index)
    return largest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_planted_documents_go_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    corpus = collected()
    for name, of in {**corpus.texts, "bench": corpus.held_out}.items():
        lines = (json.dumps({"text": text}) + "\n" for text in of)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = ", ".join(
        f"{name}: {{paths: [{name}.jsonl], weight: 1, held_out_fraction: 0}}"
        for name, of in corpus.texts.items()
        if of
    )
    asked = [
        f"data.sources={{{sources}}}",
        "data.dedup=minhash",
        "data.decontaminate=[bench.jsonl]",
    ]
    whole = compose([*asked, f"data.dedup_threshold={THRESHOLD}"]).config.data
    went: dict[str, set[tuple[str, int]]] = {}
    for name, section in whole.sources.items():
        made = build_corpus(
            section,
            ByteTokenizer(),
            tokenizer_section=new_section("tokenizer", "byte"),
            workers=2,
            run_data=whole,
            name=name,
        )
        origin = made.origin(made.train)
        assert origin is not None
        stay = set((origin["line"] - 1).tolist())
        went[name] = {(name, n) for n in range(len(corpus.texts[name])) if n not in stay}
        print(name, json.loads((Path(made.folder) / DROPPED).read_text())["reasons"])
    gone = set().union(*went.values())
    above = {at for at, index in corpus.near.items() if index >= THRESHOLD}
    planted = corpus.copies | set(corpus.near) | corpus.contaminated
    every = {(name, n) for name, of in corpus.texts.items() for n in range(len(of))}
    assert corpus.copies <= gone
    assert corpus.contaminated <= gone
    others = sorted(gone - planted)
    text = {at: corpus.texts[at[0]][at[1]] for at in every}
    largest = largest_indices([text[at] for at in others], (text[at] for at in every - gone))
    wrong = sum(index < THRESHOLD for index in largest)
    size = sum(len(each.encode()) for each in text.values()) / 1e6
    print(
        f"{size:.0f} MB, {len(every):,} documents; copies {len(corpus.copies)}, held-out passages "
        f"{len(corpus.contaminated)}: all; near {len(above & gone)} of {len(above)}; others that "
        f"went {len(others)}, of them {wrong} like nothing that stays, of {len(every - planted):,}"
    )
    assert len(above & gone) >= 0.95 * len(above)
    assert wrong <= 0.01 * len(every - planted)
