"""Benchmark of preparing a corpus: the same bytes on every executor, scaling, memory, and rates.

    python scripts/benchmarks/data_executors.py same [--gigabytes 1] [--folder DIR]
    python scripts/benchmarks/data_executors.py rates [--megabytes 60] [--out FILE]

`same` writes text of random words with planted copies (5 % exact, 5 % with three words changed),
and prepares it with MinHash deduplication and decontamination by one process, two processes, and a
Ray cluster of two nodes with one CPU each. It compares all files of the three caches, and prints
time, processor time, and the largest process.

`rates` measures each step in this process with a BPE tokenizer of 32,000 ids, in seconds of one
core, and prints what `trainctl data plan --scale` computes with.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FILES = 20
WORDS = 330
"""Mean words of a document."""
SORT_BYTES = 64 << 20


def main() -> None:
    """Run one of the two benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["same", "rates"])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--megabytes", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if arguments.what == "same":
            compare_executors(Path(name), arguments.gigabytes * 1e9)
        else:
            measure_rates(Path(name), arguments.megabytes * 1e6, arguments.out)


def write_texts(folder: Path, size: float) -> tuple[int, int]:
    """Write JSONL files of `size` bytes together; return the numbers of copies and near copies."""
    common = Counter(
        word
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        for word in re.findall(r"\S+", file.read_text(encoding="utf-8", errors="ignore"))
        if len(word) < 20
    ).most_common(50_000)
    words = np.array([word for word, _ in common], dtype=object)
    shares = np.array([count for _, count in common], dtype=float)
    draw, dice = np.random.default_rng(1), random.Random(1)
    copies = near = 0
    folder.mkdir()
    kept: list[str] = []
    for number in range(FILES):
        written = 0
        with (folder / f"{number}.jsonl").open("w") as stream:
            while written < size / FILES:
                drawn = words[draw.choice(len(words), 200_000, p=shares / shares.sum())]
                place = 0
                while place < len(drawn) - 2 * WORDS:
                    length = dice.randrange(60, 2 * WORDS - 60)
                    text = " ".join(drawn[place : place + length])
                    place += length
                    luck = dice.random()
                    if luck < 0.1 and kept:
                        text = dice.choice(kept)
                        if luck < 0.05:
                            text, near = _changed(text, dice), near + 1
                        else:
                            copies += 1
                    elif luck > 0.99:
                        kept.append(text)
                    line = json.dumps({"text": text}) + "\n"
                    written += len(line)
                    stream.write(line)
    return copies, near


def _changed(text: str, dice: random.Random) -> str:
    words = text.split(" ")
    for place in dice.sample(range(len(words)), 3):
        words[place] = f"changed{dice.randrange(10**9)}"
    return " ".join(words)


@dataclass
class Watch:
    """Largest memory of a process below this one, and of all together, in bytes.

    Pages of mapped files are not counted: the kernel takes them back when memory is short.
    """

    largest: int = 0
    together: int = 0
    _done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Look at the processes four times a second."""
        while not self._done.wait(0.25):
            sizes = list(_sizes())
            self.largest = max([self.largest, *sizes])
            self.together = max(self.together, sum(sizes))


def _sizes() -> Iterator[int]:
    """Yield the anonymous memory of processes of trainctl and of Ray's tasks below this one."""
    parents, found = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            command = (folder / "cmdline").read_bytes()
            names = (b"trainctl\0data", b"ray::", b"multiprocessing")
            if any(each in command for each in names) and not re.search(rb"IDLE|Agent", command):
                kilobytes = re.search(r"RssAnon:\s+(\d+)", (folder / "status").read_text())
                found[int(folder.name)] = 1024 * int(kilobytes[1]) if kilobytes else 0
    for pid, size in found.items():
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        if pid == os.getpid():
            yield size


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch the processes below this one."""
    watch = Watch()
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    yield watch
    watch._done.set()
    thread.join()


def prepare(texts: Path, cache: Path, *more: str) -> dict[str, Any]:
    """Run `trainctl data prepare` and return its JSON."""
    command = [
        *(sys.executable, "-P", "-m", "trainctl", "data", "prepare", "recipe=tiny", "data=files"),
        *(f"data.paths=[{texts}]", "data.held_out_fraction=0.01", "data.dedup=minhash"),
        *("data.decontaminate=[held_out]", f"data.sort_bytes={SORT_BYTES}", "--json", *more),
    ]
    environment = {**os.environ, "TRAINCTL_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def digests(cache: Path) -> dict[str, str]:
    """Return a digest of each file of a cache, with the cache's own path left out of JSON."""
    found = {}
    for path in sorted(cache.rglob("*")):
        if path.is_file() and path.suffix != ".lock":
            raw = path.read_bytes()
            if path.suffix == ".json":
                raw = raw.replace(str(cache).encode(), b"")
            found[str(path.relative_to(cache))] = hashlib.sha256(raw).hexdigest()
    return found


def compare_executors(folder: Path, size: float) -> None:
    """Prepare one text by each executor; print a line for each.

    Raises:
        SystemExit: The bytes differ.
    """
    copies, near = write_texts(folder / "texts", size)
    written = sum(file.stat().st_size for file in (folder / "texts").iterdir())
    print(f"{describe_machine()}\n{written / 1e9:.2f} GB, {copies:,} copies, {near:,} near copies")
    first: dict[str, str] = {}
    for name in ("1 process", "2 processes", "Ray, 2 nodes"):
        cache = folder / "cache"
        with (
            ray_cluster() if name.startswith("Ray") else nullcontext(()) as more,
            watched() as watch,
        ):
            before, began = _processor_seconds(), time.monotonic()
            result = prepare(folder / "texts", cache, *(more or ("--workers", name[0])))
            seconds, used = time.monotonic() - began, _processor_seconds() - before
        found = digests(cache)
        reasons = {key: each["documents"] for key, each in result["dropped"][0]["reasons"].items()}
        first = first or found
        print(
            f"{name}: {seconds:.0f} s, {used:.0f} s of processors (Ray's workers not counted), "
            f"largest process {watch.largest / 1e6:.0f} MB, together {watch.together / 1e6:.0f} "
            f"MB; {len(found):,} files, {'the same' if found == first else 'DIFFERENT'}; "
            f"left out {reasons}",
            flush=True,
        )
        if found != first:
            names = sorted(
                each for each in found.keys() | first if found.get(each) != first.get(each)
            )
            raise SystemExit(f"differ: {names[:20]}")
        shutil.rmtree(cache)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def ray_cluster() -> Iterator[Sequence[str]]:
    """Provide the options for a Ray cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    memory = 100 << 20
    head = {"num_cpus": 1, "object_store_memory": memory, "include_dashboard": False}
    cluster = Cluster(True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=memory)
        yield "data.executor=ray", f"data.executor_address={cluster.address}"
    finally:
        cluster.shutdown()


def describe_machine() -> str:
    """Return date, cores, load and versions."""
    from importlib.metadata import version

    named = ", ".join(
        f"{name} {version(name)}" for name in ("trainctl", "numpy", "tokenizers", "ray")
    )
    load = os.getloadavg()[0]
    return (
        f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f}, "
        f"Python {platform.python_version()}, {named}"
    )


def train_tokenizer(texts: Path, folder: Path) -> Path:
    """Train a BPE tokenizer of 32,000 ids on some of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=32_000, special_tokens=["</s>"], show_progress=False)
    with (texts / "0.jsonl").open() as stream:
        lines = (json.loads(line)["text"] for line, _ in zip(stream, range(5000), strict=False))
        made.train_from_iterator(lines, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


class TimedExecutor:
    """Executor that runs tasks in this process and adds up their processor seconds by step."""

    is_shared = False

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.tasks: Counter[str] = Counter()

    def run(self, tasks: Sequence[Any], done: Any = lambda task: None) -> None:
        """Run all tasks."""
        for task in tasks:
            function = task.call.func.__name__
            step = task.name.rpartition("-")[0] if function == "_write_result" else function
            began = time.process_time()
            task.call()
            self.seconds[step] += time.process_time() - began
            self.tasks[step] += 1
            done(task)


def measure_rates(folder: Path, size: float, out: Path | None) -> None:
    """Measure the steps on generated text, and write the rates as JSON."""
    from trainctl.config.compose import compose
    from trainctl.data import corpus as corpus_module
    from trainctl.data import tasks
    from trainctl.data.corpus import CorpusBuilder
    from trainctl.data.quality import decide
    from trainctl.data.tokenizer import load_tokenizer

    write_texts(folder / "texts", size)
    text_bytes = sum(file.stat().st_size for file in (folder / "texts").iterdir())
    tokenizer = train_tokenizer(folder / "texts", folder)
    os.environ["TRAINCTL_CACHE_DIR"] = str(folder / "cache")
    os.environ["RAYON_NUM_THREADS"] = "1"
    tasks.TASK_BYTES = 4 << 20
    config = compose(
        [
            *("recipe=tiny", "data=files", f"data.paths=[{folder}/texts]", "data.dedup=minhash"),
            *("tokenizer=file", f"tokenizer.path={tokenizer}", "data.held_out_fraction=0.01"),
            f"data.sort_bytes={4 << 20}",
        ]
    ).config
    executor = TimedExecutor()
    timed(executor, decide, "decide_removals")
    timed(executor, corpus_module, "write_corpus")
    builder = CorpusBuilder(
        config=config.data,
        tokenizer=load_tokenizer(config.tokenizer),
        run_data=config.data,
        tokenizer_section=config.tokenizer,
        executor=executor,
    )
    made = builder.build()
    seconds = executor.seconds
    documents = made.train.documents + made.held_out.documents
    dropped = json.loads((Path(made.folder) / "dropped.json").read_text())
    documents = dropped["documents"] + made.held_out.documents
    parts = next((folder / "cache").glob("store-*")) / "parts"
    columns = next((folder / "cache").glob("quality-*"))
    measures = measure_columns(folder)
    rates = {
        "measured": describe_machine(),
        "text_bytes": text_bytes,
        "documents": documents,
        "tokens": int(sum(json.loads(p.read_text())["tokens"] for p in parts.glob("*/part.json"))),
        "seconds": {
            "tokenize": seconds["tokenize_task"],
            "filters": measures["filters"] * text_bytes,
            "signatures": measures["signatures"] * text_bytes,
            "shuffle": seconds["near-map"] + seconds["identical-map"],
            "compare": sum(seconds[f"{name}-reduce"] for name in ("near", "identical")),
            "decide": seconds["decide_removals"],
            "assemble": seconds["write_corpus"],
        },
        "duplicates": sum(each["documents"] for each in dropped["reasons"].values()),
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "disk": {
            "parts": _bytes_in(parts),
            "columns": _bytes_in(columns),
        },
    }
    text = json.dumps(rates, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


def timed(executor: TimedExecutor, module: Any, name: str) -> None:
    """Have a function of a module add its processor seconds."""
    function = getattr(module, name)

    def call(*arguments: Any, **more: Any) -> Any:
        began = time.process_time()
        inside = sum(executor.seconds.values())
        result = function(*arguments, **more)
        nested = sum(executor.seconds.values()) - inside
        executor.seconds[name] += time.process_time() - began - nested
        return result

    setattr(module, name, call)


def measure_columns(folder: Path) -> dict[str, float]:
    """Return processor seconds per byte of reading, of signatures, and of four filters."""
    from functools import partial

    from trainctl.config.registry import load_spec
    from trainctl.data.quality.columns import PartToMeasure
    from trainctl.data.quality.measurement import WantedColumns, measure_part

    names = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
    filters = {name: load_spec("filter", name).keys() for name in names}
    file = folder / "texts" / "0.jsonl"
    seconds = {}
    for name, wanted, some in (
        ("read", WantedColumns(near=False), {}),
        ("signatures", WantedColumns(near=True), {}),
        ("filters", WantedColumns(near=False), filters),
    ):
        part = PartToMeasure(name, "part", "", partial(_entries, file), some)
        began = time.process_time()
        measure_part(part, folder / "measured", wanted)
        seconds[name] = (time.process_time() - began) / file.stat().st_size
    return {
        name: each - (seconds["read"] if name != "read" else 0) for name, each in seconds.items()
    }


def _entries(file: Path) -> Iterator[Any]:
    from trainctl.data.quality.batches import Entry

    with file.open() as stream:
        for number, line in enumerate(stream):
            yield Entry(number, json.loads(line)["text"])


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
