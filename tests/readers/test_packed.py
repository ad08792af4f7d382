"""Packed files: what is in them, in any pieces, cut off anywhere, broken, and grown too far."""

import bz2
import gzip
import io
import json
import lzma
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers import plain, stream
from trainctl.readers.documents import Reader
from trainctl.readers.files import find_files
from trainctl.readers.stream import DamagedFile, is_compressed, open_decompressed, uncompressed_name
from trainctl.tuning.input_files import missing_files

PACKERS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_content_size=False).compress,
}
KINDS = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}
pieces = st.lists(st.binary(max_size=300), min_size=1, max_size=5)
LINES = "".join(json.dumps({"text": f"text {n} " * (n % 7)}) + "\n" for n in range(500)).encode()


class InMemory:
    """A file that hands out few bytes at a time."""

    name = "a"

    def __init__(self, raw):
        self.raw = raw

    def open(self, mode):
        return io.BytesIO(self.raw)

    def __str__(self):
        return "a"


@pytest.mark.parametrize("ending", PACKERS)
@given(pieces, st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_streams_one_after_the_other_are_one_text(ending, texts, bytes_in, bytes_out):
    """However they are cut, by whoever packed them and by us."""
    packed = b"".join(PACKERS[ending](text) for text in texts)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_IN": bytes_in, "_OUT": bytes_out, "_ZSTD_IN": bytes_in}.items():
            patch.setattr(stream, name, value)
        with open_decompressed(InMemory(packed)) as unpacked:
            assert unpacked.read() == b"".join(texts)


@pytest.mark.parametrize("ending", PACKERS)
@given(pieces, st.data())
@settings(max_examples=40, deadline=None)
def test_a_file_that_is_cut_off_is_no_shorter_text(ending, texts, data):
    """Anywhere but where one stream ends and the next begins."""
    streams = [PACKERS[ending](text) for text in texts]
    edges = [sum(map(len, streams[:count])) for count in range(len(streams) + 1)]
    packed = b"".join(streams)
    at = data.draw(st.integers(6, len(packed)))
    with open_decompressed(InMemory(packed[:at])) as unpacked:
        if at in edges:
            assert unpacked.read() == b"".join(texts[: edges.index(at)])
        else:
            with pytest.raises(DamagedFile, match=f"a is cut off: its {KINDS[ending]} stream"):
                unpacked.read()


@pytest.mark.parametrize("ending", PACKERS)
def test_a_broken_stream_is_named(ending):
    packed = bytearray(PACKERS[ending](LINES))
    packed[len(packed) // 2 : len(packed) // 2 + 8] = b"\xff" * 8
    with open_decompressed(InMemory(bytes(packed))) as unpacked:
        with pytest.raises(DamagedFile, match=f"a is damaged: its {KINDS[ending]} stream breaks"):
            unpacked.read()
    with open_decompressed(
        InMemory(PACKERS[ending](LINES) + b"and then something else")
    ) as unpacked:
        with pytest.raises(DamagedFile):
            unpacked.read()


def test_frames_that_are_to_be_skipped_and_padding_are_no_text():
    skipped = struct.pack("<II", 0x184D2A53, 5) + b"index"
    packed = skipped + PACKERS["zst"](b"one ") + skipped + PACKERS["zst"](b"two") + skipped
    assert open_decompressed(InMemory(packed)).read() == b"one two"
    assert open_decompressed(InMemory(gzip.compress(b"one") + bytes(700))).read() == b"one"
    assert open_decompressed(InMemory(lzma.compress(b"one") + bytes(8))).read() == b"one"


@pytest.mark.parametrize("ending", PACKERS)
def test_a_bomb_ends_before_it_fills_the_memory(ending, monkeypatch):
    monkeypatch.setattr(stream, "ALWAYS_ALLOWED", 1 << 20)
    bomb = PACKERS[ending](bytes(1 << 25))
    read = 0
    with open_decompressed(InMemory(bomb)) as unpacked:
        with pytest.raises(DamagedFile, match=r"a is no text: [0-9,]+ bytes become more than"):
            while piece := unpacked.read(1 << 16):
                read += len(piece)
    assert read <= max(1 << 20, stream.MOST_GROWTH * len(bomb)) < 1 << 25


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_text_and_lines_are_the_same_documents(ending, tmp_path):
    section = new_section("data", "files")
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(LINES)
        (tmp_path / f"{name}.{ending}").write_bytes(PACKERS[ending](LINES))
        files = [tmp_path / name, tmp_path / f"{name}.{ending}"]
        plainly, packed = (
            [(each.text, each.line) for each in Reader(section).documents([file])] for file in files
        )
        assert packed == plainly
        assert plain.line_numbers(files[0]) == plain.line_numbers(files[1])
        assert [is_compressed(file) for file in files] == [False, True]
        assert uncompressed_name(files[1]) == name
    found = find_files(str(tmp_path), (".jsonl", ".txt"))
    assert len(found.files) == 4 and not found.left_out


def config_of(*paths):
    config = RunConfig()
    config.data = new_section("data", "files", paths=[str(path) for path in paths])
    config.training.sequence_length = 64
    return config


def test_what_is_wrong_in_packed_files_is_found_before_a_launch(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(LINES)[:-40])
    (tmp_path / "broken.xz").write_bytes(lzma.compress(LINES)[:20] + bytes(90))
    (tmp_path / "key.jsonl.zst").write_bytes(PACKERS["zst"](b'{"body": "some text"}\n'))
    (tmp_path / "good.txt.gz").write_bytes(gzip.compress(LINES))
    found = missing_files(config_of(tmp_path / "*"))
    assert sorted((each.rule, each.key) for each in found) == [
        ("TC138", "data.paths"),
        ("TC139", "data.text_key"),
    ]
    text = "\n".join(each.message for each in found)
    assert "cut.jsonl.gz is cut off" in text or "broken.xz is damaged" in text
    assert "1 more of 4 files" in text and "key.jsonl.zst:1: no text under 'text'" in text
    # Sizes of packed files say nothing of the length of a text: 8 KiB are more than enough here.
    small = tmp_path / "small.gz"
    small.write_bytes(gzip.compress(b"a" * 9999))
    assert small.stat().st_size <= 64 and missing_files(config_of(small)) == []


def test_zstd_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    file = tmp_path / "a.zst"
    file.write_bytes(PACKERS["zst"](b"text"))
    with pytest.raises(TrainctlError, match="zstd needs a package that is missing") as caught:
        open_decompressed(file)
    assert caught.value.hint == "pip install 'trainctl[data]'"
    assert caught.value.exit_code == ExitCode.environment
    (finding,) = missing_files(config_of(file))
    assert finding.hint == caught.value.hint


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=20),
    st.booleans(),
    st.integers(1, 200),
)
@settings(max_examples=100, deadline=None)
def test_ranges_of_a_file_have_each_line_once(tmp_path_factory, texts, has_last_end, size):
    file = tmp_path_factory.mktemp("parts") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file.write_bytes("\n".join([*lines, ""][: None if has_last_end else -1]).encode())
    found = plain.ranges(file, size)
    assert [start for start, _ in found] == [0, *(end for _, end in found)][: len(found)]
    reader = Reader(new_section("data", "files"))
    assert [each.text for span in found for each in reader.read(file, span)] == texts


def test_what_cannot_be_divided_has_no_ranges(tmp_path):
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(LINES))
    assert plain.ranges(packed, 1000) == []
    (tmp_path / "a.txt").write_bytes(LINES)
    assert plain.ranges(tmp_path / "a.txt", 1000) == []
