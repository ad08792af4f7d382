"""Corpora that others have tokenized: the same ids and ends in each form, and what is refused."""

import gzip
import struct
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenized_forms import (
    END,
    datatrove,
    dolma,
    flat,
    llm_c,
    megatron,
    numpy_file,
)

from trainctl.data import tokenized
from trainctl.data.tokenized import ends_by_id, open_tokenized
from trainctl.errors import TrainctlError

VOCABULARY = 50_000
DOCUMENTS = [[5, 6, 7, END], [49_999, END], [END], [1, 2, END]]
IDS = [number for document in DOCUMENTS for number in document]
ENDS = np.cumsum([len(document) for document in DOCUMENTS]).tolist()

FORMS = {
    "megatron": (megatron, None, ["<u2", "<i4", "<i8"]),
    "datatrove": (datatrove, None, ["<u2", "<u4"]),
    "dolma": (dolma, "u2", ["<u2"]),
    "dolma of 4 bytes": (dolma, "uint32", ["<u4"]),
    "llm.c": (llm_c, None, ["<u2", "<u4"]),
    "flat": (flat, "u2", ["<u2"]),
    "numpy": (numpy_file, None, ["<u2", "<u4", "<i8"]),
}
CASES = [(make, given, dtype) for make, given, types in FORMS.values() for dtype in types]


@pytest.mark.parametrize(("make", "given_type", "dtype"), CASES)
def test_every_form_has_the_same_ids_and_ends(tmp_path, make, given_type, dtype):
    found = open_tokenized(make(tmp_path, DOCUMENTS, dtype), given_type)
    assert found.ids.tolist() == IDS and found.ids.dtype == np.dtype(dtype)
    assert not found.ids.flags.owndata and not found.ids.flags.writeable
    ends = ends_by_id(found.ids, END) if found.ends is None else found.ends
    assert ends.tolist() == ENDS and ends.dtype == np.int64
    assert found.problems(VOCABULARY, END) == found.problems(VOCABULARY, END, whole=True) == []


@given(
    st.lists(st.lists(st.integers(1, 400), max_size=9), min_size=1, max_size=20), st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_documents_are(tmp_path_factory, documents, sequences):
    """Empty ones too, and documents of several sequences."""
    folder = tmp_path_factory.mktemp("forms")
    ends = np.cumsum([len(document) for document in documents]).tolist()
    if ends[-1] == 0:
        return
    for file in (
        megatron(folder, documents, sequences=sequences),
        datatrove(folder, documents),
        dolma(folder, documents, header="start,end,id,src,loc\n"),
    ):
        found = open_tokenized(file, "u2")
        assert found.ids.tolist() == [*chain(*documents)] and found.ends.tolist() == ends
    closed = [number for document in documents for number in (*document, END)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenized, "_CHUNK", 3)
        expected = np.cumsum([len(document) + 1 for document in documents]).tolist()
        assert ends_by_id(np.array(closed), END).tolist() == expected
        assert ends_by_id(np.array([*closed, 7]), END).tolist() == [*expected, len(closed) + 1]
    assert ends_by_id(np.array([], "<u2"), END).tolist() == []


def test_the_width_of_datatroves_ids_is_found_without_its_metadata(tmp_path):
    assert open_tokenized(datatrove(tmp_path, DOCUMENTS, "<u4", metadata="")).ids.tolist() == IDS
    (tmp_path / "d.ds.metadata").write_text("gpt2\n11\n11T")  # from when ids had two bytes
    with pytest.raises(TrainctlError, match="its index ends at id 10, and it has 20"):
        open_tokenized(tmp_path / "d.ds")
    found = open_tokenized(datatrove(tmp_path, DOCUMENTS, "<u2", metadata="org/name"))
    assert found.tokenizer == "org/name" and found.ids.tolist() == IDS


@pytest.mark.parametrize("make", [megatron, datatrove, dolma])
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_is_cut_off_is_refused(tmp_path_factory, make, data):
    """The file of ids or its index is truncated at any byte."""
    folder = tmp_path_factory.mktemp("cut")
    file = make(folder, DOCUMENTS)
    index = {".bin": "m.idx", ".ds": "d.ds.index", ".npy": "o.csv.gz"}[file.suffix]
    chosen = data.draw(st.sampled_from([file, folder / index]))
    raw = chosen.read_bytes()
    chosen.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(TrainctlError, match="cannot be used"):
        open_tokenized(file, "u2")


def changed(file, at, form, *values):
    raw = bytearray(file.read_bytes())
    struct.pack_into(form, raw, at, *values)
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "<B", 0, "it is no index of Megatron's"),
        (9, "<Q", 2, "its version is 2, not 1"),
        (17, "<B", 7, "its type is number 7, which is none of ids"),
        (17, "<B", 4, "its sequences do not follow one another"),
        (18, "<Q", 1 << 40, "it is cut off"),
        (34, "<i", 3, "its sequences do not follow one another"),
        (34, "<i", -1, "its sequences do not follow one another"),
        (34 + 12 * 4, "<q", 1, "its documents do not have each sequence once"),
        (34 + 12 * 4 + 8, "<q", 3, "its documents do not have each sequence once"),
    ],
)
def test_an_index_of_megatron_s_that_does_not_fit_is_refused(tmp_path, at, form, value, message):
    file = megatron(tmp_path, DOCUMENTS)
    changed(file.with_suffix(".idx"), at, form, value)
    with pytest.raises(TrainctlError, match=message):
        open_tokenized(file)


def test_an_index_of_another_file_is_refused(tmp_path):
    file = megatron(tmp_path, DOCUMENTS)
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(TrainctlError, match=r"m\.bin cannot be used: its index ends at id 10, and"):
        open_tokenized(file)
    file = datatrove(tmp_path, DOCUMENTS)
    changed(tmp_path / "d.ds.index", 0, "<Q", 7)
    with pytest.raises(TrainctlError, match="the ends of its documents do not ascend"):
        open_tokenized(file)
    file = dolma(tmp_path, DOCUMENTS)
    (tmp_path / "o.csv.gz").write_bytes(gzip.compress(b"0,4\n5,10\n"))
    with pytest.raises(TrainctlError, match="its documents do not follow one another"):
        open_tokenized(file, "u2")
    (tmp_path / "o.csv.gz").write_bytes(gzip.compress(b"a,b\n"))
    with pytest.raises(TrainctlError, match="its rows do not begin with two places"):
        open_tokenized(file, "u2")
    file = llm_c(tmp_path, DOCUMENTS)
    file.write_bytes(file.read_bytes() + b"\x01\x00")
    with pytest.raises(TrainctlError, match="its header says 10 ids, and it has 11"):
        open_tokenized(file)


def test_what_cannot_be_ids_is_refused(tmp_path):
    with pytest.raises(TrainctlError, match="nothing tells of which type the ids in"):
        open_tokenized(flat(tmp_path, DOCUMENTS))
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(TrainctlError, match="3 bytes are no ids of 2 bytes"):
        open_tokenized(tmp_path / "train.bin", "u2")
    np.save(tmp_path / "f.npy", np.ones(3))
    with pytest.raises(TrainctlError, match=r"an array of float64 of shape \(3,\), not a list"):
        open_tokenized(tmp_path / "f.npy")
    np.save(tmp_path / "o.npy", np.array([{}]))
    with pytest.raises(TrainctlError, match="numpy cannot read it"):
        open_tokenized(tmp_path / "o.npy")
    with pytest.raises(TrainctlError, match=r"cannot read .*none\.bin: No such file"):
        open_tokenized(tmp_path / "none.bin", "u2")


def test_ids_of_another_tokenizer_are_named(tmp_path):
    found = open_tokenized(megatron(tmp_path, DOCUMENTS))
    (problem,) = found.problems(1000, END)
    assert problem.endswith("has the id 49,999 at token 4, and the vocabulary has 1,000")
    (problem,) = found.problems(100_000, END)
    assert "ids of 2 bytes, which cannot be those of a vocabulary of 100,000" in problem
    (problem,) = found.problems(VOCABULARY, 9)
    assert problem.endswith("ends in 9, the tokenizer's end of a document; the first ends in 0")
    assert found.problems(VOCABULARY, None) == []
    negative = open_tokenized(megatron(tmp_path, [[1, -1, END]], "<i4"))
    assert "has the id -1 at token 1," in negative.problems(VOCABULARY, END)[0]
    (tmp_path / "empty.bin").write_bytes(b"")
    (problem,) = open_tokenized(tmp_path / "empty.bin", "u2").problems(VOCABULARY, END)
    assert problem.endswith("empty.bin is empty")


def test_the_other_width_is_proposed(tmp_path):
    file = flat(tmp_path, [[5, 6, 40_000, 8]] * 9, "<u2")
    (problem,) = open_tokenized(file, "u4").problems(VOCABULARY, None)
    assert problem.endswith("; they would fit as uint16")
    file = flat(tmp_path, [[70_000, 6, 40_000, 65_000]] * 9, "<u4")
    (problem,) = open_tokenized(file, "u2").problems(100, None)
    assert "would fit" not in problem


def test_a_long_file_is_looked_at_here_and_there(tmp_path):
    ids = np.ones(3_000_000, "<u2")
    ids[-1] = 60_000
    file = tmp_path / "long.bin"
    file.write_bytes(ids.tobytes())
    (problem,) = open_tokenized(file, "u2").problems(VOCABULARY, None)
    assert "at token 2,999,999" in problem
    ids[-1], ids[1_234_567] = 1, 60_000
    file.write_bytes(ids.tobytes())
    assert (
        "at token 1,234,567" in open_tokenized(file, "u2").problems(VOCABULARY, None, whole=True)[0]
    )


def test_what_is_no_index_or_header_at_all_is_refused_in_words(tmp_path):
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (%d,), }\n" % 10**23
    written = {
        "long.npy": b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header,
        "torn.npy": b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 30,
        "ids.npy": b"\x01\x00\x02\x00",
        "ids.csv.gz": gzip.compress(b"0,%d\n" % 10**23),
    }
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    for name in ("long.npy", "torn.npy", "ids.npy"):
        with pytest.raises(TrainctlError, match="cannot be used"):
            open_tokenized(tmp_path / name, "u2")
    for name, content in {
        "ids.ds": b"\x01\x00\x02\x00",
        "ids.ds.index": struct.pack("<Q", 2),
        "ids.ds.metadata": b"\xff\xfe|2\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    assert open_tokenized(tmp_path / "ids.ds").ids.tolist() == [1, 2]
