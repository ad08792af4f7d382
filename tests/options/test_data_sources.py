"""Tables and tars as sources: the documents, what is refused, and what is cut off."""

import csv
import gzip
import io
import json
import os
import signal
import struct
import tarfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.config.registry import load_spec, new_section
from trainctl.config.schema import OnBadText, RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.data import arrow, parquet
from trainctl.readers.documents import Reader
from trainctl.readers.files import find_files, split_files
from trainctl.readers.stream import DamagedFile
from trainctl.readers.tables import NoTextColumn, read_in_process
from trainctl.tuning.input_files import missing_files

TEXTS = ["first", "", 'two\nlines, and a "quote"', "Ωmega \U0001f600", "x" * 200_000, "last"] * 3


def read(kind, file, **fields):
    reader = Reader(new_section("data", kind, **fields))
    return [(each.text, each.line) for each in reader.documents([file])], reader.bad


def texts(kind, file, **fields):
    return [text for text, _ in read(kind, file, **fields)[0]]


def config_of(kind, *paths, **fields):
    config = RunConfig()
    config.data = new_section("data", kind, paths=[str(path) for path in paths], **fields)
    config.training.sequence_length = 64
    return config


def table(**columns):
    return pa.table({"id": range(len(TEXTS)), "text": TEXTS, **columns})


TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.dictionary(pa.int32(), pa.string()),
]


def write_stream(file, whole, rows=4):
    with pa.ipc.new_stream(str(file), whole.schema) as out:
        out.write_table(whole, max_chunksize=rows)


def write_file(file, whole, rows=4):
    with pa.ipc.new_file(str(file), whole.schema) as out:
        out.write_table(whole, max_chunksize=rows)


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_the_rows_of_parquet_and_arrow_are_the_documents(tmp_path, kind):
    raw = [text.encode() for text in TEXTS] if "binary" in str(kind) else TEXTS
    whole = table().set_column(1, "text", pa.array(raw).cast(kind))
    expected = [(text, row) for row, text in enumerate(TEXTS, 1)]
    if kind != pa.string_view():  # Parquet gives strings
        pq.write_table(whole, tmp_path / "a.parquet", row_group_size=5, compression="zstd")
        assert read("parquet", tmp_path / "a.parquet")[0] == expected
    write_stream(tmp_path / "stream.arrow", whole)
    assert read("arrow", tmp_path / "stream.arrow")[0] == expected
    write_file(tmp_path / "file.arrow", whole)
    assert read("arrow", tmp_path / "file.arrow")[0] == expected


def test_feather_is_arrow(tmp_path):
    pyarrow.feather.write_feather(table(), tmp_path / "a.feather", compression="lz4")
    assert texts("arrow", tmp_path / "a.feather") == TEXTS


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=9)), st.integers(1, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_ranges_of_parquet_have_each_row_once(tmp_path_factory, rows, group, data):
    file = tmp_path_factory.mktemp("parts") / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), file, row_group_size=group)
    ranges = load_spec("data", "parquet").ranges(file, data.draw(st.integers(1, 2000)))
    reader = Reader(new_section("data", "parquet"))
    found = [(each.text, each.line) for span in ranges for each in reader.read(file, span)]
    assert found == [(text, row) for row, text in enumerate(rows, 1)]
    assert texts("parquet", file) == rows


WRITERS = {
    "parquet": lambda file, whole: pq.write_table(whole, file, row_group_size=4),
    "arrow": write_stream,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_column_names_those_that_are_there(tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    WRITERS[kind](file, table(body=TEXTS))
    (finding,) = missing_files(config_of(kind, tmp_path, text_key="bdy"))
    assert (finding.rule, finding.key) == ("TC139", "data.text_key")
    assert "no column 'bdy' of texts: it has 'id' (int64), 'text', 'body'" in finding.message
    assert finding.hint == "data.text_key=body"
    with pytest.raises(TrainctlError, match=r"no column 'id' of texts: it has 'id' \(int64\)"):
        read(kind, file, text_key="id")


@pytest.mark.parametrize("kind", WRITERS)
def test_a_column_that_is_there_twice_is_none(tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    WRITERS[kind](file, pa.Table.from_arrays([["a"], ["b"], ["c"]], ["text", "body", "text"]))
    with pytest.raises(TrainctlError, match="'text' of texts: it has 'text' twice, 'body'"):
        read(kind, file)
    assert texts(kind, file, text_key="body") == ["b"]


@pytest.mark.parametrize("kind", WRITERS)
def test_bad_cells_by_each_policy(tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    WRITERS[kind](file, pa.table({"text": pa.array([b"one", b"caf\xe9", None, b"two"])}))
    with pytest.raises(TrainctlError, match=r"row 2: byte 0xe9 is not UTF-8"):
        read(kind, file)
    with pytest.raises(TrainctlError, match=r"row 3: no text under 'text'"):
        read(kind, file, on_bad_text=OnBadText.replace)
    found, bad = read(kind, file, on_bad_text=OnBadText.skip)
    assert found == [("one", 1), ("two", 4)] and bad.skipped == 2


@pytest.mark.parametrize("kind", ["parquet", "arrow", "file"])
def test_a_table_that_is_cut_off_anywhere_is_no_shorter_one(tmp_path, kind):
    file = tmp_path / "a"
    short = pa.table({"text": [f"text {n}" for n in range(12)]})
    {**WRITERS, "file": write_file}[kind](file, short)
    kind = "arrow" if kind == "file" else kind
    raw = file.read_bytes()
    for size in [*range(0, len(raw), max(1, len(raw) // 40)), len(raw) - 1]:
        file.write_bytes(raw[:size])
        with pytest.raises(DamagedFile, match="cut off"):
            read(kind, file)
        (finding,) = missing_files(config_of(kind, file))
        assert finding.rule == "TC138" and finding.key == "data.paths"
    file.write_bytes(raw)
    assert len(texts(kind, file)) == 12


def with_offset(file, row, offset):
    """Change the offset at which a text of a column begins."""
    raw = bytearray(file.read_bytes())
    begins = [sum(len(text.encode()) for text in TEXTS[:n]) for n in range(len(TEXTS) + 1)]
    at = raw.index(struct.pack(f"<{len(begins)}i", *begins)) + 4 * row
    raw[at : at + 4] = struct.pack("<i", offset)
    file.write_bytes(raw)


@pytest.mark.parametrize("write", [write_file, write_stream])
@pytest.mark.parametrize("offset", [0x7FFFFF00, -0x7FFFFF00], ids=["beyond", "negative"])
@pytest.mark.parametrize("row", [1, len(TEXTS)])
def test_an_offset_outside_its_buffer_is_damage_and_no_signal(tmp_path, write, row, offset):
    file = tmp_path / "a.arrow"
    write(file, pa.table({"text": TEXTS}), len(TEXTS))
    assert texts("arrow", file) == TEXTS
    with_offset(file, row, offset)
    with pytest.raises(DamagedFile, match=r"no Arrow, or cut off or damaged: .*offset"):
        read("arrow", file)
    with pytest.raises(DamagedFile, match=r"no Arrow, or cut off or damaged: .*offset"):
        [*arrow.records(file)]


def test_a_short_buffer_and_an_index_outside_the_dictionary_are_damage(tmp_path):
    file = tmp_path / "a.arrow"
    write_stream(file, pa.table({"text": TEXTS}), len(TEXTS))
    raw = file.read_bytes()
    length = struct.pack("<q", sum(len(text.encode()) for text in TEXTS))
    file.write_bytes(raw.replace(length, struct.pack("<q", 3), 1))
    with pytest.raises(DamagedFile, match="no Arrow, or cut off or damaged"):
        read("arrow", file)
    index = pa.array([0, 1 << 20] * 8, pa.int32())
    array = pa.DictionaryArray.from_arrays(index, pa.array(TEXTS), safe=False)
    write_stream(file, pa.table({"text": array}))
    with pytest.raises(DamagedFile, match="no Arrow, or cut off or damaged"):
        read("arrow", file)


def test_a_file_that_shrinks_while_it_is_mapped_ends_in_words(tmp_path):
    file = tmp_path / "a.arrow"
    write_file(file, pa.table({"text": ["a text of some length " * 99] * 4096}), 256)
    found = iter(Reader(new_section("data", "arrow")).read(file))
    assert next(found).line == 1
    os.truncate(file, 1 << 14)
    with pytest.raises(
        DamagedFile, match=r"a\.arrow is damaged: the process that read it died by SIG"
    ):
        assert [*found]
    write_file(file, table())
    assert texts("arrow", file) == TEXTS


def test_what_else_ends_the_reading_process_is_reported(tmp_path):
    with pytest.raises(TrainctlError, match="read 9 was killed by signal 9") as caught:
        [*read_in_process(signal.raise_signal, 9)]
    assert caught.value.exit_code == ExitCode.environment and not isinstance(
        caught.value, DamagedFile
    )


def test_a_reading_process_that_hangs_is_reported(monkeypatch):
    monkeypatch.setattr("trainctl.readers.tables.SECONDS", 0.5)
    with pytest.raises(TrainctlError, match=r"read 20 gave nothing for 0\.5 s") as caught:
        [*read_in_process(time.sleep, 20)]
    assert caught.value.exit_code == ExitCode.environment


def test_readings_may_be_left_and_mixed(tmp_path):
    files = [tmp_path / f"{n}.parquet" for n in range(3)]
    for number, file in enumerate(files):
        rows = [f"{number} {row}" for row in range(2000)]
        pq.write_table(pa.table({"text": rows}), file, row_group_size=100)
    for _ in range(3):
        assert next(iter(parquet.records(files[0])))[1] == {"text": "0 0"}
    mixed = zip(*(texts_of(file) for file in files), strict=True)
    assert [*mixed][-1] == ("0 1999", "1 1999", "2 1999")


def texts_of(file):
    return (each.text for each in Reader(new_section("data", "parquet")).read(file))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_column_without_a_name_in_utf_8_and_dates_beyond_python_are_errors(tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    records = {"parquet": parquet, "arrow": arrow}[kind].records
    WRITERS[kind](file, pa.table({"text": ["a"], "when": pa.array([1 << 62], pa.timestamp("us"))}))
    assert texts(kind, file) == ["a"]
    with pytest.raises(TrainctlError, match="has values that cannot be read"):
        [*records(file)]
    file.write_bytes(file.read_bytes().replace(b"text", b"te\xfft"))
    with pytest.raises(TrainctlError):
        read(kind, file)


def saved_dataset(folder, *shards):
    """Write a dataset as `datasets`' `save_to_disk` does."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{len(shards):05d}.arrow" for n in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_stream(folder / name, pa.table({"text": rows}))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_has_the_files_that_it_names(tmp_path):
    saved_dataset(tmp_path / "d" / "train", ["a", "b"], ["c"])
    saved_dataset(tmp_path / "d" / "test", ["d"])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    write_stream(tmp_path / "d" / "train" / "cache-1f.arrow", pa.table({"text": ["a b"]}))
    whole, train = (config_of("arrow", tmp_path / "d" / each).data for each in ("", "train"))
    train.held_out_paths = [str(tmp_path / "d" / "test")]
    files = split_files(train)
    assert [text for file in files.train for text in texts("arrow", file)] == ["a", "b", "c"]
    assert [text for file in files.held_out for text in texts("arrow", file)] == ["d"]
    assert missing_files(config_of("arrow", tmp_path / "d")) == []
    choose = load_spec("data", "arrow").choose
    assert len(find_files(whole.paths[0], (".arrow",), choose).files) == 3
    (tmp_path / "d" / "train" / "data-00001-of-00002.arrow").unlink()
    (finding,) = missing_files(config_of("arrow", tmp_path / "d"))
    assert "state.json names data-00001-of-00002.arrow, which is not there" in finding.message
    (tmp_path / "d" / "train" / "state.json").write_text('{"_data_files": 3}')
    with pytest.raises(TrainctlError, match="does not say which files"):
        split_files(train)


def written(rows, **dialect):
    out = io.StringIO(newline="")
    csv.writer(out, **dialect).writerows(rows)
    return out.getvalue().encode()


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_the_rows_of_csv_are_the_documents_with_their_first_lines(tmp_path, name):
    rows = [["id", "text"], *([n, text] for n, text in enumerate(TEXTS))]
    raw = b"\xef\xbb\xbf" + written(rows, delimiter="\t" if "tsv" in name else ",")
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    found, _ = read("csv", tmp_path / name)
    assert [text for text, _ in found] == TEXTS
    assert [line for _, line in found[:5]] == [2, 3, 4, 6, 7]
    assert missing_files(config_of("csv", tmp_path)) == []
    with pytest.raises(TrainctlError, match="no column 'body' of texts: it has 'id', 'text'"):
        read("csv", tmp_path / name, text_key="body")


def test_a_bad_row_of_csv_by_each_policy(tmp_path):
    file = tmp_path / "a.csv"
    bad = {
        b'"x"y,one': r":3: not CSV: ',' expected after '\"'",
        b"1,two,more": ":3: 3 fields, where the first row has 2",
        b"1": ":3: 1 fields, where the first row has 2",
        b"1,caf\xe9": ":3: byte 0xe9 is not UTF-8",
    }
    for row, message in bad.items():
        file.write_bytes(b"id,text\n0,good\n" + row + b"\n2,last\n")
        with pytest.raises(TrainctlError, match=message):
            read("csv", file)
        (finding,) = missing_files(config_of("csv", file))
        assert finding.rule == "TC142"
        found, account = read("csv", file, on_bad_text=OnBadText.skip)
        assert found == [("good", 2), ("last", 4)] and account.skipped == 1
    assert texts("csv", file, on_bad_text=OnBadText.replace) == ["good", "caf\ufffd", "last"]
    file.write_bytes(b'id,text\n0,good\n1,"never closed\n2,last\n')
    with pytest.raises(TrainctlError, match=":3: not CSV: unexpected end of data"):
        read("csv", file)
    file.write_bytes(b"text,text\n0,good\n")
    with pytest.raises(TrainctlError, match="no column 'text' of texts: it has 'text' twice"):
        read("csv", file)
    file.write_bytes(b"PAR1" + bytes(99))
    with pytest.raises(DamagedFile, match="is Parquet, not CSV"):
        read("csv", file)
    file.write_bytes(b"id|text\n0|good\n")
    assert texts("csv", file, delimiter="|") == ["good"]
    with pytest.raises(TrainctlError, match=r"data.delimiter='\|\|' is not one character"):
        read("csv", file, delimiter="||")


def tar_of(members, **options):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as tar:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return out.getvalue()


SAMPLES = {
    f"part/{n:04d}{'x' * 150 if n == 2 else ''}.{ending}": raw
    for n, text in enumerate(TEXTS)
    for ending, raw in (
        ("cls", b"\x00\x01"),
        ("txt", text.encode()),
        ("meta.json", json.dumps({"id": n, "body": text}).encode()),
    )
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_members_of_a_tar_are_the_documents(tmp_path, layout, packed):
    members = {name.replace("x" * 150, "x" * 70): raw for name, raw in SAMPLES.items()}
    raw = tar_of(members if layout == tarfile.USTAR_FORMAT else SAMPLES, format=layout)
    file = tmp_path / ("a.tar.gz" if packed else "a.tar")
    file.write_bytes(gzip.compress(raw) if packed else raw)
    expected = [(text, number) for number, text in enumerate(TEXTS, 1)]
    assert read("webdataset", file)[0] == expected
    assert read("webdataset", file, member="meta.json", text_key="body")[0] == expected
    assert missing_files(config_of("webdataset", tmp_path)) == []
    (finding,) = missing_files(config_of("webdataset", tmp_path, member="text"))
    assert finding.key == "data.member" and finding.hint == "data.member=cls"
    assert "no member's name ends in 'text': they end in 'cls', 'txt', 'meta.json'" in (
        finding.message
    )
    with pytest.raises(TrainctlError, match="no text under 'text': it has texts under 'body'"):
        read("webdataset", file, member="meta.json")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_tar_that_is_cut_off_anywhere_is_no_shorter_one(tmp_path_factory, data):
    """Between two members too, where tarfile sees nothing; and within the zeros of its end."""
    sizes = data.draw(st.lists(st.integers(0, 1100), min_size=1, max_size=4))
    fill = data.draw(st.sampled_from([b"a", b"\x00"]))
    raw = tar_of({f"{n}.txt": fill * size for n, size in enumerate(sizes)})
    end = sum(512 + -(-size // 512) * 512 for size in sizes)
    file = tmp_path_factory.mktemp("cut") / "a.tar"
    at = data.draw(st.sampled_from([*range(0, end + 1024, 512)]) | st.integers(0, end + 1023))
    file.write_bytes(raw[:at])
    with pytest.raises(DamagedFile):
        read("webdataset", file)
    file.write_bytes(raw[: end + 1024])
    assert texts("webdataset", file) == [fill.decode() * size for size in sizes]


def test_tars_one_after_the_other_are_refused(tmp_path):
    file = tmp_path / "a.tar"
    file.write_bytes(tar_of({"1.txt": b"one"}) + tar_of({"2.txt": b"two"}))
    with pytest.raises(DamagedFile, match=r"damaged at byte 1,024, or tars one after the other"):
        read("webdataset", file)
    file.write_bytes(tar_of({"1.txt": b"one", "2.txt": b"two"})[:1024] + b"no header" * 999)
    with pytest.raises(DamagedFile, match=r"damaged at byte 1,024"):
        read("webdataset", file)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_without_its_package_the_extra_is_named(tmp_path, monkeypatch, kind):
    file = tmp_path / f"a.{kind}"
    WRITERS[kind](file, table())
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "pyarrow.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"))
    (finding,) = missing_files(config_of(kind, file))
    assert "reading Parquet and Arrow needs a package that is missing" in finding.message
    assert finding.hint == "pip install 'trainctl[data]'" and finding.exit_code == 4


def test_a_first_row_that_is_a_text_is_not_repeated_whole() -> None:
    told = NoTextColumn(
        Path("notes.csv"), "text", ["'" + "many words " * 1000 + "'"], ["many words " * 1000]
    )
    assert len(told.message) < 200 and len(told.hint) < 100
