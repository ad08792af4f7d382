"""Token ids in the file formats of other tools, written as those tools write them."""

import gzip
import struct
from itertools import chain

import numpy as np

END = 0
"""End-of-document token, where a test needs one."""


def megatron(folder, documents, dtype="<u2", sequences=1):
    """Write as `IndexedDatasetBuilder` does; a document may consist of several sequences."""
    parts = [np.array_split(np.array(each, dtype), sequences) for each in documents]
    lengths = [len(part) for each in parts for part in each]
    size = np.dtype(dtype).itemsize
    places = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]) * size
    code = {"<u2": 8, "<i4": 4, "<i8": 5, "u1": 1}[dtype]
    firsts = np.arange(len(documents) + 1) * sequences
    (folder / "m.bin").write_bytes(np.concatenate([*chain(*parts)]).tobytes())
    (folder / "m.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(firsts))
        + np.array(lengths, "<i4").tobytes()
        + places.astype("<i8").tobytes()
        + firsts.astype("<i8").tobytes()
    )
    return folder / "m.bin"


def datatrove(folder, documents, dtype="<u2", metadata="gpt2|{}"):
    ids = np.array([*chain(*documents)], dtype)
    ends = np.cumsum([len(document) for document in documents])
    (folder / "d.ds").write_bytes(ids.tobytes())
    (folder / "d.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata:
        text = metadata.format(ids.itemsize) + f"\n{len(ids)}\n{len(ids)}T"
        (folder / "d.ds.metadata").write_text(text)
    return folder / "d.ds"


def dolma(folder, documents, dtype="<u2", header=""):
    (folder / "o.npy").write_bytes(np.array([*chain(*documents)], dtype).tobytes())
    ends = np.cumsum([len(document) for document in documents]).tolist()
    rows = [
        f"{a},{b},id,s3://x,{n}\n" for n, (a, b) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    (folder / "o.csv.gz").write_bytes(gzip.compress((header + "".join(rows)).encode()))
    return folder / "o.npy"


def llm_c(folder, documents, dtype="<u2"):
    ids = np.array([*chain(*documents)], dtype)
    header = np.zeros(256, "<i4")
    header[:3] = {2: 20240520, 4: 20240801}[ids.itemsize], 1, len(ids)
    (folder / "l.bin").write_bytes(header.tobytes() + ids.tobytes())
    return folder / "l.bin"


def flat(folder, documents, dtype="<u2"):
    (folder / "train.bin").write_bytes(np.array([*chain(*documents)], dtype).tobytes())
    return folder / "train.bin"


def numpy_file(folder, documents, dtype="<u2"):
    np.save(folder / "n.npy", np.array([*chain(*documents)], dtype))
    return folder / "n.npy"
