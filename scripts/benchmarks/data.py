"""Benchmark of a run's data path: tokenizing, sample order, reading samples, waiting for batches.

    python scripts/benchmarks/data.py [--megabytes 24] [--rounds 3] [--peers PYTHON]

- **Tokenizing**: `trainctl data prepare` compared with a bare loop of `tokenizers`,
  `datasets.map` and datatrove: the same JSONL, the same tokenizer, interleaved. Each runs on the
  whole corpus and on a twentieth of it; the rate is that of the difference, which excludes
  start-up. `--peers` is a Python with `tokenizers`, `datasets` and `datatrove` (trainctl need not
  be installed there); missing packages are reported and left out.
- **Order**: microseconds per sample and bytes of memory for three sources and two stages, with
  corpora of 10^6 to 10^12 tokens.
- **Reading**: random samples of 2,048 tokens compared with slices of a bare memory map.
- **Waiting**: the share of a step of `recipe=tiny` that its ranks wait for their batch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainctl.data.corpus import Corpus
from trainctl.data.order import OrderedSource, OrderedStage, SampleOrder
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.data import PackedDataset

PEERS = Path(__file__).with_name("data_peers.py")
VOCABULARY = 8000
CORES = len(os.sched_getaffinity(0))
LENGTH = 2048
"""Tokens of a sample."""


def main() -> None:
    """Measure the four parts and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=24.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, small, tokenizer = _material(folder, int(arguments.megabytes * 1e6))
        prepared = _tokenizing(folder, corpus, small, tokenizer, arguments.rounds, arguments.peers)
        _order()
        _reading(prepared, arguments.rounds)
        _waiting(folder)


def _material(folder: Path, size: int) -> tuple[Path, Path, Path]:
    """Write Python's standard library as JSONL, a twentieth of that JSONL, and a tokenizer trained
    on it.
    """
    corpus, small = folder / "corpus.jsonl", folder / "small.jsonl"
    begun: list[str] = []
    with corpus.open("w") as whole, small.open("w") as part:
        for text in _texts(size):
            line = json.dumps({"text": text}) + "\n"
            whole.write(line)
            if part.tell() < size // 20:
                part.write(line)
                begun.append(text)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        begun,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.save(str(folder / "tokenizer.json"))
    return corpus, small, folder / "tokenizer.json"


def _texts(size: int) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if size <= 0:
            return
        if text.strip():
            size -= len(text)
            yield text


def _tokenizing(
    folder: Path, corpus: Path, small: Path, tokenizer: Path, rounds: int, python: str
) -> Corpus:
    """Print the tokens per second of each tokenizing loop, medians of interleaved rounds. Return
    trainctl's corpus.
    """
    loops = {"trainctl": _ours(tokenizer, folder)} | {
        loop: _peer(python, loop, tokenizer, folder) for loop in ("bare", "datasets", "datatrove")
    }
    tokens: dict[str, int] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for loop, run in loops.items():
            if loop in times and not times[loop]:
                continue
            try:
                (few, short), (many, long) = run(small), run(corpus)
            except subprocess.CalledProcessError as error:
                print(f"{loop} cannot run: {error.stderr.strip().splitlines()[-1]}")
                times[loop] = []
                continue
            tokens[loop] = many
            times.setdefault(loop, []).append((short, (many - few) / (long - short)))
    print(f"\nTokenizing {corpus.stat().st_size / 1e6:.0f} MB on {CORES} cores")
    print(f"{'':<10}{'tokens':>12}{'tokens/s':>12}{'of bare':>9}{'to start, s':>13}")
    rates = {
        loop: statistics.median(rate for _, rate in each) for loop, each in times.items() if each
    }
    for loop, rate in rates.items():
        ratio = statistics.median(
            ours / bare for (_, ours), (_, bare) in zip(times[loop], times["bare"], strict=True)
        )
        start = statistics.median(seconds for seconds, _ in times[loop])
        print(f"{loop:<10}{tokens[loop]:>12,}{rate:>12,.0f}{ratio:>9.2f}{start:>13.1f}")
    record = next((folder / "cache").glob("corpus-*/corpus.json"))
    return Corpus.load(record)


def _ours(tokenizer: Path, folder: Path) -> Callable[[Path], tuple[int, float]]:
    def run(corpus: Path) -> tuple[int, float]:
        cache = folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        settings = [
            "recipe=tiny",
            "data=files",
            f"data.paths=[{corpus}]",
            "data.held_out_fraction=0",
            "tokenizer=file",
            f"tokenizer.path={tokenizer}",
            f"model.vocab_size={VOCABULARY}",
        ]
        command = [sys.executable, "-m", "trainctl", "data", "prepare", *settings, "--json"]
        output, seconds = _timed(command, {"TRAINCTL_CACHE_DIR": str(cache)})
        return int(json.loads(output)["train"]["tokens"]), seconds

    return run


def _peer(
    python: str, loop: str, tokenizer: Path, folder: Path
) -> Callable[[Path], tuple[int, float]]:
    def run(corpus: Path) -> tuple[int, float]:
        target = folder / loop
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        command = [python, str(PEERS), loop, str(corpus), str(tokenizer), str(target), str(CORES)]
        output, seconds = _timed(command, {"HF_HOME": str(target / "home")})
        return int(output.splitlines()[-1]), seconds

    return run


def _timed(command: list[str], environment: dict[str, str]) -> tuple[str, float]:
    start = time.perf_counter()
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | environment
    )
    return done.stdout, time.perf_counter() - start


def _order() -> None:
    """Print the time and memory to find a sample's place in the order, for three lengths of the
    corpus.
    """
    print(f"\nThe order, 3 sources, 2 stages\n{'tokens':>10}{'us, 8 a call':>14}", end="")
    print(f"{'us, 4,096 a call':>18}{'bytes':>10}")
    for tokens in (10**6, 10**9, 10**12):
        tracemalloc.start()
        order = _an_order(tokens)
        order.at(np.arange(4096))
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        of_call = [_microseconds(order, tokens, count) for count in (8, 4096)]
        print(f"{tokens:>10.0e}{of_call[0]:>14.1f}{of_call[1]:>18.2f}{size:>10,}")


def _an_order(tokens: int) -> SampleOrder:
    weights = {"code": Fraction(7, 10), "prose": Fraction(2, 10), "manuals": Fraction(1, 10)}
    sources = [OrderedSource(name, int(tokens * share)) for name, share in weights.items()]
    annealed = {"code": Fraction(1, 5), "prose": Fraction(4, 5)}
    half = tokens // LENGTH // 2
    return SampleOrder(
        1,
        sources,
        [OrderedStage(0, LENGTH, weights), OrderedStage(half, LENGTH // 4, annealed)],
    )


def _microseconds(order: SampleOrder, tokens: int, count: int) -> float:
    draw = np.random.default_rng(0)
    calls = [draw.integers(0, tokens // LENGTH, count) for _ in range(30)]
    times = []
    for counters in calls:
        start = time.process_time()
        order.at(counters)
        times.append(time.process_time() - start)
    return statistics.median(times) / count * 1e6


def _reading(corpus: Corpus, rounds: int) -> None:
    """Print the speed of reading batches of samples beside slices of a bare memory map, with a
    warm page cache.
    """
    split = corpus.train
    data = PackedDataset(corpus, split, sequence_length=LENGTH, mask_documents=False)
    ours = corpus.tokens(split, in_order=False)
    bare = np.memmap(Path(corpus.folder) / split.file, dtype=corpus.dtype, mode="r")
    places = np.random.default_rng(0).integers(0, data.num_samples, (200, 8))

    def rows_of(ids: npt.NDArray[np.integer], indices: npt.NDArray[np.int64]) -> torch.Tensor:
        rows = np.empty((len(indices), LENGTH + 1), dtype=np.int64)
        for row, index in zip(rows, indices.tolist(), strict=True):
            row[:] = ids[index * LENGTH : (index + 1) * LENGTH + 1]
        return torch.from_numpy(rows)

    ways: dict[str, Callable[[npt.NDArray[np.int64]], object]] = {
        "slices of a bare memory map": lambda indices: rows_of(bare, indices),
        "slices of a corpus": lambda indices: rows_of(ours, indices),
        "whole micro-batches, with ends": data.micro_batch,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(max(rounds, 5) * 4 + 1):
        for way, function in ways.items():
            start = time.process_time()
            for indices in places:
                function(indices)
            if turn:
                times[way].append((time.process_time() - start) / places.size * 1e6)
    first = next(iter(times.values()))
    print(f"\nReading samples of {LENGTH:,} tokens, 8 a call, warm: CPU us a sample, of bare")
    for way, each in times.items():
        ratio = statistics.median(one / other for one, other in zip(first, each, strict=True))
        print(f"{way:<32}{statistics.median(each):>8.1f}{ratio:>8.2f}")


def _waiting(folder: Path) -> None:
    """Print the share of step time that the tiny recipe waits for data."""
    run = RunPaths(folder / "run")
    command = [sys.executable, "-m", "trainctl", "launch", "recipe=tiny", "training.steps=120"]
    _timed([*command, "--run-dir", str(run.root)], {})
    splits = [event["seconds"] for event in read_events(run.events) if event["event"] == "step"]
    waited, total = (sum(split[part] for split in splits[20:]) for part in ("data", "total"))
    print(f"\nWaiting for data: {waited / total:.2%} of a step of recipe=tiny")


if __name__ == "__main__":
    main()
