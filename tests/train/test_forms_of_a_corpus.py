"""One corpus in every form that a source reads: the same tokens on the same sides."""

import csv
import io
import json
import tarfile

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from trainctl.config.registry import new_section
from trainctl.data.corpus import build_corpus
from trainctl.data.tokenizer import ByteTokenizer

TEXTS = [f"document {n}\n" * (n % 17 + 1) + '\u00e9, "\U0001f600"' for n in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def jsonl(folder):
    (folder / "a.jsonl").write_bytes(LINES)
    return {}


def packed(folder):
    pack = zstandard.ZstdCompressor().compress
    (folder / "a.jsonl.zst").write_bytes(pack(LINES[:3000]) + pack(LINES[3000:]))
    return {}


def elsewhere(folder):
    (folder / "a.jsonl").write_bytes(LINES)
    fsspec.filesystem("memory").pipe("/elsewhere/a.jsonl", LINES)
    return {"paths": ["memory://elsewhere/a.jsonl"]}


def parquet(folder):
    pq.write_table(pa.table({"body": TEXTS}), folder / "a.parquet", row_group_size=70)
    return {"kind": "parquet", "text_key": "body"}


def dataset(folder):
    whole = pa.table({"text": TEXTS})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), whole.schema) as out:
        out.write_table(whole, max_chunksize=70)
    files = [{"filename": "data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    return {"kind": "arrow"}


def table(folder):
    with (folder / "a.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["text"], *([text] for text in TEXTS)])
    return {"kind": "csv"}


def tar(folder):
    with tarfile.open(folder / "a.tar", "w") as out:
        for number, text in enumerate(TEXTS):
            info = tarfile.TarInfo(f"{number:06d}.txt")
            info.size = len(text.encode())
            out.addfile(info, io.BytesIO(text.encode()))
    return {"kind": "webdataset"}


@pytest.mark.parametrize("form", [packed, elsewhere, parquet, dataset, table, tar])
def test_the_form_of_a_corpus_changes_no_token(tmp_path, monkeypatch, form):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    corpora = []
    for make in (jsonl, form):
        folder = tmp_path / make.__name__
        folder.mkdir()
        fields = {"kind": "files", "paths": [str(folder)], **make(folder)}
        section = new_section("data", fields.pop("kind"), held_out_fraction=0.1, **fields)
        corpora.append(build_corpus(section, ByteTokenizer()))
    plain, other = corpora
    assert plain.folder != other.folder and plain.digest == other.digest
    assert other.train.documents + other.held_out.documents == len(TEXTS)
    for split in ("train", "held_out"):
        ids = [corpus.tokens(getattr(corpus, split)) for corpus in corpora]
        assert len(ids[0]) and np.array_equal(*ids)
