"""Other tokenizing loops on the same JSONL with the same tokenizer; each writes ids to a flat file.

    python scripts/benchmarks/data_peers.py LOOP CORPUS TOKENIZER FOLDER WORKERS

LOOP is `bare`, `datasets` or `datatrove`. `bare` is a hand-written loop: `json.loads` of each line,
a call of `encode_batch_fast` with its own threads per thousand texts, numpy to the disk. Prints the
number of tokens. `data.py` starts this script with a Python that has these packages; it imports
nothing of trainctl.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

TOGETHER = 1000
"""Texts per call."""


def main() -> None:
    """Tokenize the corpus and print the number of tokens."""
    loop, corpus, tokenizer, folder, workers = sys.argv[1:]
    tokens = LOOPS[loop](Path(corpus), Path(tokenizer), Path(folder), int(workers))
    print(tokens)


def bare(corpus: Path, tokenizer: Path, folder: Path, workers: int) -> int:
    """Tokenize with `encode_batch_fast` on all cores of one process; append the end-of-text id to
    each document.
    """
    import numpy as np
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer))
    end, kind = 0, np.dtype("<u2" if backend.get_vocab_size() <= 1 << 16 else "<u4")
    total = 0
    with (folder / "ids.bin").open("wb") as out:
        for texts in _batches(corpus):
            for each in backend.encode_batch_fast(texts, add_special_tokens=False):
                ids = np.append(np.asarray(each.ids, dtype=kind), kind.type(end))
                ids.tofile(out)
                total += len(ids)
    return total


def with_datasets(corpus: Path, tokenizer: Path, folder: Path, workers: int) -> int:
    """Tokenize with `datasets.map` in batches, one process per core."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    backend = Tokenizer.from_file(str(tokenizer))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = backend.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"ids": [[*each.ids, 0] for each in encodings]}

    cache = str(folder / "cache")
    rows = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=cache)
    tokenized = rows.map(
        encode, batched=True, batch_size=TOGETHER, num_proc=workers, remove_columns=["text"]
    )
    return int(sum(len(each) for each in tokenized.with_format("numpy")["ids"]))


def with_datatrove(corpus: Path, tokenizer: Path, folder: Path, workers: int) -> int:
    """Tokenize with datatrove, one task per worker; each document counts its end token."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    parts = folder / "parts"
    parts.mkdir()
    _divide(corpus, parts, workers)
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(parts)),
            DocumentTokenizer(
                str(folder / "ids"), tokenizer_name_or_path=str(tokenizer), eos_token=None
            ),
        ],
        tasks=workers,
        workers=workers,
        logging_dir=str(folder / "logs"),
    ).run()
    documents = sum(1 for _ in corpus.open("rb"))
    size = sum(file.stat().st_size for file in (folder / "ids").rglob("*.ds"))
    return size // 2 + documents  # one end token per document, as the other loops count


def _batches(corpus: Path) -> Iterator[list[str]]:
    texts: list[str] = []
    with corpus.open("rb") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            if len(texts) == TOGETHER:
                yield texts
                texts = []
    if texts:
        yield texts


def _divide(corpus: Path, folder: Path, count: int) -> None:
    """Deal the lines of the corpus to one file per task, since datatrove assigns whole files to
    tasks.
    """
    files = [(folder / f"{number}.jsonl").open("wb") for number in range(count)]
    with corpus.open("rb") as lines:
        for number, line in enumerate(lines):
            files[number % count].write(line)
    for file in files:
        file.close()


LOOPS = {"bare": bare, "datasets": with_datasets, "datatrove": with_datatrove}

if __name__ == "__main__":
    main()
