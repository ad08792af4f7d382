"""Throughput of each document filter and deduplication step, in megabytes of text per CPU second.

    python scripts/benchmarks/data_quality.py [PATH ...] [--megabytes 20] [--rounds 3]

Measures the files below the paths (by default Python's own library) in one process; some texts are
repeated and some have words changed. The steps take turns over the same batches, and each gets the
median of its rounds. For comparison, a plain MinHash handles one document at a time: `re.findall`,
a checksum per word, and the same 112 minima by numpy.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from trainctl.config.registry import function_of, list_kinds, load_spec
from trainctl.data.quality import measurement
from trainctl.data.quality.batches import DocumentBatch, Entry, batches
from trainctl.data.quality.columns import MeasuredCorpus, PartToMeasure
from trainctl.data.quality.decide import decide_removals
from trainctl.data.quality.measurement import WantedColumns, anchors, measure_part, text_hashes
from trainctl.data.quality.near_duplicates import find_identical_texts, near_pairs, shared_passages
from trainctl.data.quality.selection import Contamination, Rules, write_held_out
from trainctl.data.quality.shuffle import search_in
from trainctl.data.source_sampler import splitmix64

PARTS = 4


def main() -> None:
    """Measure the steps and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    paths = arguments.paths or [Path(sysconfig.get_path("stdlib"))]
    texts = list(_texts(paths, int(arguments.megabytes * 1e6)))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {megabytes:.1f} MB; MB per CPU second:")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = write_held_out(folder / "held_out", _entries(texts[::50]))
        steps: dict[str, Callable[[DocumentBatch], object]] = {
            "copies: 128-bit hashes": text_hashes,
            "near copies: signatures and sketches": _near,
            "shared passages: anchors": anchors,
            f"held-out passages: {len(held_out.ngrams):,} n-grams": held_out.find,
            **{
                f"filter {each}": _measure(each) for each in list_kinds("filter") if _is_plain(each)
            },
            "near copies, the plain way": _plainly,
        }
        times: dict[str, list[float]] = {step: [] for step in steps}
        for _ in range(arguments.rounds):
            for step, function in steps.items():
                times[step].append(_timed(function, texts))
        for step, seconds in times.items():
            print(f"{megabytes / statistics.median(seconds):9.1f}  {step}")
        _decide(texts, megabytes, folder)


def _texts(paths: list[Path], size: int) -> Iterator[str]:
    """Yield texts of `size` bytes in total; one in ten is a copy, and one in ten has words
    changed.
    """
    draw = random.Random(0)
    files = [path for each in paths for path in each.rglob("*") if path.is_file()]
    draw.shuffle(files)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if "\0" in text:
            continue
        for each in (text, *_planted(text, draw)):
            size -= len(each)
            yield each
        if size < 0:
            return


def _planted(text: str, draw: random.Random) -> list[str]:
    kind = draw.randrange(10)
    if kind == 0:
        return [text]
    if kind == 1:
        return [re.sub(r"\w+", lambda word: "x" if draw.random() < 0.01 else word[0], text)]
    return []


def _timed(function: Callable[[DocumentBatch], object], texts: list[str]) -> float:
    """Return the CPU seconds of a step over all texts, including the parts of a batch that only
    this step computes.
    """
    total = 0.0
    for batch in batches(_entries(texts)):
        start = time.process_time()
        function(batch)
        total += time.process_time() - start
    return total


def _near(batch: DocumentBatch) -> None:
    values, counts = measurement.ngram_sets(batch)
    measurement.signatures(values, counts)
    measurement.sketches(values, counts)


def _plainly(batch: DocumentBatch) -> None:
    drawn = splitmix64(np.arange(2 * measurement.HASHES, dtype=np.uint64))
    odd, added = drawn[: measurement.HASHES] | np.uint64(1), drawn[measurement.HASHES :]
    for text in batch.lowered:
        words = [zlib.crc32(word.encode()) for word in re.findall(r"\w+", text)]
        hashes = np.array(words, dtype=np.uint64)
        size = len(hashes) - measurement.WORDS + 1
        if size < 1:
            continue
        grams = splitmix64(hashes[:size])
        for place in range(1, measurement.WORDS):
            grams = splitmix64(grams ^ hashes[place : place + size])
        grams = np.unique(grams)
        ((grams[:, None] * odd + added) >> np.uint64(16)).min(0)


def _measure(name: str) -> Callable[[DocumentBatch], object]:
    measured: Callable[[DocumentBatch], object] = function_of("filter", name)
    return measured


def _is_plain(name: str) -> bool:
    """Return True if the step needs no option from the user."""
    return not load_spec("filter", name).settings


def _decide(texts: list[str], megabytes: float, folder: Path) -> None:
    """Measure texts into columns, find duplicates and decide on documents, each once."""
    filters = {
        name: load_spec("filter", name).keys() for name in list_kinds("filter") if _is_plain(name)
    }
    parts = [
        PartToMeasure("all", str(number), "", partial(_entries, texts[number::PARTS]), filters)
        for number in range(PARTS)
    ]
    start = time.process_time()
    for part in parts:
        measure_part(part, folder, WantedColumns(held_out=folder / "held_out", passages=True))
    measured = time.process_time()
    corpus = MeasuredCorpus.load(parts, folder)
    with search_in(corpus, folder / "scratch") as search:
        same = find_identical_texts(search)
        exact = time.process_time()
        pairs = near_pairs(search, same, 0.8)
        near = time.process_time()
        passages = shared_passages(search, same)
        substring = time.process_time()
    rules = Rules(near=0.8, substring=0.8, filters={"all": filters}, contamination=Contamination())
    selection = decide_removals(corpus, rules, same, pairs, passages)
    end = time.process_time()
    print(f"{megabytes / (measured - start):9.1f}  all of it, written as columns")
    print(f"{megabytes / (exact - measured):9.1f}  finding {len(same):,} copies")
    print(f"{megabytes / (near - exact):9.1f}  finding {len(pairs.ids):,} pairs of near copies")
    print(f"{megabytes / (substring - near):9.1f}  finding {len(passages.anchor):,} shared anchors")
    print(f"{megabytes / (end - substring):9.1f}  deciding: {int(selection.stays.sum()):,} stay")
    for of in selection.counts.values():
        for reason, tally in of.items():
            print(f"{tally.documents:9,}  go for {reason}, which applies to {tally.applies:,}")
    size = sum(path.stat().st_size for path in (folder / "all").rglob("*.bin")) / 1e6
    print(f"{size / megabytes:9.3f}  bytes of columns for a byte of text")


def _entries(texts: list[str]) -> list[Entry]:
    return [Entry(number, text) for number, text in enumerate(texts)]


if __name__ == "__main__":
    main()
