"""A corpus of what Python brings, with copies, near copies and held-out passages planted in it."""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics

from trainctl.data.quality.batches import Entry
from trainctl.data.quality.columns import PartToMeasure


@cache
def texts_of_python(code_files: int = 80) -> dict[str, tuple[str, ...]]:
    """Sources of the standard library, and topics of its documentation, each text once."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py")) + sorted(folder.glob("[a-k]*/*.py"))
    code = [path.read_text(encoding="utf-8", errors="replace") for path in files[:code_files]]
    prose = [text for _, text in sorted(topics.items())]
    return {"code": tuple(dict.fromkeys(code)), "prose": tuple(dict.fromkeys(prose))}


def five_grams(text: str) -> frozenset[tuple[str, ...]]:
    """Return the set of 5-grams of a text, unhashed, for an exact Jaccard index."""
    words = re.findall(r"\w+", text.lower())
    return frozenset(zip(*(words[shift:] for shift in range(5)), strict=False))


def jaccard(left: frozenset[tuple[str, ...]], right: frozenset[tuple[str, ...]]) -> float:
    return len(left & right) / max(1, len(left | right))


def edited(text: str, share: float, draw: random.Random) -> str:
    """Return the text with about this share of its words replaced, and at least one."""

    def another(found: re.Match[str]) -> str:
        return f"w{draw.randrange(10**6)}" if draw.random() < share else found[0]

    result = text
    while result == text:
        result = re.sub(r"\w+", another, text)
    return result


@dataclass(frozen=True)
class Planted:
    """The corpus."""

    texts: Mapping[tuple[str, str], list[str]]
    copies: list[tuple[tuple[str, str, int], tuple[str, str, int]]]
    """Documents that have another's text: (source, part, number) of both."""
    near: list[tuple[tuple[str, str, int], tuple[str, str, int]]]
    """Near copies with some changed words, each with its original."""
    contaminated: list[tuple[str, str, int]]
    """Documents with a passage of a held-out text in them."""
    held_out: list[str]

    def text(self, document: tuple[str, str, int]) -> str:
        source, part, number = document
        return self.texts[source, part][number]


def planted(seed: int = 0, code_files: int = 80) -> Planted:
    """Five parts of two sources, and a third with what was planted."""
    draw = random.Random(seed)
    texts: dict[tuple[str, str], list[str]] = {("planted", "0"): []}
    for source, every in texts_of_python(code_files).items():
        for number, text in enumerate(every):
            texts.setdefault((source, str(number % 5)), []).append(text)
    base = [
        (source, part, number)
        for (source, part), every in texts.items()
        for number, text in enumerate(every)
        if len(five_grams(text)) >= 50
    ]
    result = Planted(texts, [], [], [], [])
    mine = texts["planted", "0"]
    for original in draw.sample(base, 60):
        result.copies.append((("planted", "0", len(mine)), original))
        mine.append(result.text(original))
    for share in (0.005, 0.01, 0.02, 0.03, 0.05):
        for original in draw.sample(base, 60):
            result.near.append((("planted", "0", len(mine)), original))
            mine.append(edited(result.text(original), share, draw))
    for number in range(40):
        words = [f"held{draw.randrange(10**6)}" for _ in range(200 if number % 4 else 10)]
        result.held_out.append(" ".join(words))
        if number % 2:
            continue
        start = draw.randrange(len(words) - 12) if len(words) > 13 else 0
        passage = ", ".join(words[start : start + 13]).upper()
        host = result.text(draw.choice(base))
        at = draw.randrange(len(host))
        result.contaminated.append(("planted", "0", len(mine)))
        mine.append(f"{edited(host, 0.5, draw)} {passage} {host[:at][::-1]}")
    return result


def parts_of(
    texts: Mapping[tuple[str, str], list[str]], **filters: Mapping[str, object]
) -> list[PartToMeasure]:
    """Parts to measure, with the filters of each source."""
    return [
        PartToMeasure(source, name, "1", partial(entries, tuple(every)), filters.get(source, {}))
        for (source, name), every in texts.items()
    ]


def entries(texts: Iterable[str]) -> list[Entry]:
    """Documents numbered from 0."""
    return [Entry(number, text) for number, text in enumerate(texts)]
