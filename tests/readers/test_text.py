"""The text of a corpus: bad text by each policy, and what is found before anything starts."""

import gzip
import json
import os
import re
import time
import zipfile
from pathlib import Path

import pytest

from trainctl.config import reading
from trainctl.config.registry import new_section
from trainctl.config.schema import OnBadText, RunConfig
from trainctl.errors import Severity, TrainctlError
from trainctl.readers import documents
from trainctl.readers import documents as silence
from trainctl.readers.documents import Document, Reader, split_documents
from trainctl.readers.files import find_files, split_files
from trainctl.tuning.input_files import missing_files

DEEP = "[" * 100_000
LINES = {
    "not UTF-8": (b'{"text": "caf\xe9"}', r"a\.jsonl:2: byte 0xe9 is not UTF-8", "caf\ufffd"),
    "surrogate": (rb'{"text": "a\ud800b"}', r"a\.jsonl:2: a lone surrogate, U\+D800", "a\ufffdb"),
    "broken": (b'{"text": ', r"a\.jsonl:2: not JSON: Expecting value at column 9", None),
    "deep": (DEEP.encode(), r"a\.jsonl:2: not read: JSON nested too deeply", None),
    "number": (b'{"text": ' + b"9" * 5000 + b"}", r"a\.jsonl:2: not read: ", None),
    "no object": (b'["text"]', r"a\.jsonl:2: a JSON array, not an object", None),
    "no text": (b'{"body": "x"}', r"a\.jsonl:2: no text under 'text': it has texts", None),
}


def read(file, policy):
    reader = Reader(new_section("data", "files", on_bad_text=OnBadText(policy)))
    return [(each.text, each.line) for each in reader.documents([file])], reader.bad


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_by_each_policy(tmp_path, name):
    line, message, replaced = LINES[name]
    file = tmp_path / "a.jsonl"
    good = [b'{"text": "first"}', b'{"text": "\xf0\x9f\x98\x80 \\ud83d\\ude00 last"}']
    file.write_bytes(b"\n".join([good[0], line, b"", good[1], b""]))
    first, last = ("first", 1), ("\U0001f600 \U0001f600 last", 4)
    with pytest.raises(TrainctlError, match=message) as caught:
        read(file, "error")
    hint = "data.text_key=body" if name == "no text" else "data.on_bad_text="
    assert hint in caught.value.hint and caught.value.exit_code == 2
    documents, bad = read(file, "skip")
    assert documents == [first, last] and (bad.skipped, bad.replaced) == (1, 0)
    assert f"{file}:2: " in bad.examples[0]
    if replaced is None:
        with pytest.raises(TrainctlError, match=message):
            read(file, "replace")
        return
    documents, bad = read(file, "replace")
    assert documents == [first, (replaced, 2), last] and (bad.skipped, bad.replaced) == (0, 1)


@pytest.mark.parametrize(
    ("raw", "message", "replaced"),
    [
        (b"one\ntwo \xff\n", r"a\.txt:2: byte 0xff is not UTF-8", "one\ntwo \ufffd\n"),
        (b"x" * 70_000 + b"\n\x00", r"a\.txt:2: a NUL is not text", "x" * 70_000 + "\n\ufffd"),
    ],
)
def test_a_bad_text_file_by_each_policy(tmp_path, raw, message, replaced):
    file = tmp_path / "a.txt"
    file.write_bytes(raw)
    with pytest.raises(TrainctlError, match=message):
        read(file, "error")
    assert read(file, "replace")[0] == [(replaced, None)]
    assert read(file, "skip")[0] == []


def test_line_ends_and_a_byte_order_mark_are_no_text(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")
    assert read(file, "error")[0] == [("one\ntwo\n", None)]
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n')
    assert read(lines, "error")[0] == [("x", 1)]


def run_of(*paths, **fields):
    config = RunConfig()
    config.data = new_section("data", "files", paths=[str(path) for path in paths], **fields)
    config.training.sequence_length = 64
    return config


TEXT = "a line of text\n" * 40
BINARY = {
    "a.lz4": (b"\x04\x22\x4d\x18x", "lz4"),
    "b.txt": (b"\x04\x22\x4d\x18y", "lz4"),
    "png.gz": (gzip.compress(b"\x89PNG\r\n\x1a\n"), "PNG"),
    "a.tar": (b"name".ljust(257, b"\x00") + b"ustar", "tar"),
    "a.parquet": (b"PAR1\x15\x04", "Parquet"),
    "a.arrow": (b"ARROW1\x00\x00", "Arrow"),
    "a.jsonl": (b"ARROW1\x00\x00", "Arrow"),
    "a.png": (b"\x89PNG\r\n\x1a\n", "PNG"),
    "a.pdf": (b"%PDF-1.7\n", "PDF"),
    "a.bin": (b"some\x00bytes", "NUL"),
    "utf16.txt": ("text".encode("utf-16"), "UTF-16"),
}


def test_files_that_are_no_text_are_found_at_once_and_never_read(tmp_path):
    for name, (raw, _) in BINARY.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(TrainctlError, match="not text"):
            read(tmp_path / name, "skip")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", TEXT)
    (tmp_path / "good.txt").write_text(TEXT)
    found = missing_files(run_of(tmp_path / "*"))
    assert {finding.rule for finding in found} == {"TC138"}
    text = "\n".join(finding.message for finding in found)
    for kind in ("zip", *(kind for _, kind in BINARY.values())):
        assert kind in text
    (packed,) = [finding for finding in found if "lz4" in finding.message]
    assert "1 more of 13 files" in packed.message and "lz4 -d " in packed.hint
    assert len(found) == len({kind for _, kind in BINARY.values()}) + 1


def test_text_under_another_key_and_bad_text_are_found_with_the_rest(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "7", "content": TEXT}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"txt": TEXT, "title": TEXT * 2}) + "\n")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [{"text": TEXT}]}) + "\n")
    (tmp_path / "d.txt").write_bytes(b"caf\xe9\n" + TEXT.encode() * 9999)
    config = run_of(tmp_path / "*", tmp_path / "none" / "*.txt")
    found = missing_files(config)
    assert [(finding.rule, finding.key) for finding in found] == [
        ("TC115", "data.paths"),
        *[("TC139", "data.text_key")] * 3,
        ("TC142", "data.on_bad_text"),
    ]
    assert found[1].hint == "data.text_key=content"
    assert "it has texts under 'content', 'id'" in found[1].message
    assert found[2].hint == "data.text_key=txt"
    assert "its keys are 'messages', with no text" in found[3].message
    assert "d.txt:1: byte 0xe9" in found[4].message
    config.data.on_bad_text = OnBadText.skip
    assert "TC142" not in {finding.rule for finding in missing_files(config)}
    # A key that no line has is no bad line.
    assert [finding.rule for finding in missing_files(config)].count("TC139") == 3
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write(json.dumps({"text": TEXT}) + "\n")
    assert [finding.rule for finding in missing_files(config)].count("TC139") == 2


def test_a_folder_gives_its_texts_and_says_what_it_leaves_out(tmp_path):
    folder = tmp_path / "corpus"
    for name in ("b.txt", "deep/er/a.md", "deep/c.jsonl", ".git/x.txt", "deep/.y.txt", "z.py", "q"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": TEXT}))
    found = find_files(str(folder), (".jsonl", ".md", ".txt"))
    names = [str(file.relative_to(folder)) for file in found.files]
    assert names == ["b.txt", "deep/c.jsonl", "deep/er/a.md"]
    assert split_files(run_of(folder, held_out_fraction=0).data).train == found.files
    (finding,) = missing_files(run_of(folder, held_out_fraction=0))
    assert finding.severity is Severity.warning and finding.rule == "TC140"
    assert "3 of its files are read" in finding.message and "1 .py" in finding.message
    for file in found.files:
        file.unlink()
    config = run_of(folder)
    (finding,) = missing_files(config)
    assert finding.is_error and finding.rule == "TC140" and "1 .py" in finding.message
    assert finding.hint.endswith(f"{folder}/**/*.py")
    with pytest.raises(TrainctlError, match="no file in"):
        split_files(config.data)


def divided(file, **fields):
    config = run_of(file, **fields).data
    found = {"train": [], "held_out": []}
    for side, document in split_documents(config, split_files(config), Reader(config)):
        found[side].append((document.text, document.line))
    return found


def test_of_a_single_file_documents_are_held_out(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"document {number % 500}"}) + "\n" for number in range(600)]
    file.write_text("".join(lines))
    found = divided(file)
    texts = {side: [text for text, _ in each] for side, each in found.items()}
    assert 10 <= len(texts["held_out"]) <= 60
    assert not set(texts["train"]) & set(texts["held_out"])  # nor has any a twin on the other side
    numbers = [line for each in found.values() for _, line in each]
    assert sorted(numbers) == list(range(1, 601))
    assert found["train"] == sorted(found["train"], key=lambda each: each[1])
    # One more moves no other.
    file.write_text("".join([*lines, json.dumps({"text": "one more"})]))
    assert set(found["held_out"]) <= set(divided(file)["held_out"])
    assert divided(file, held_out_fraction=0.0)["held_out"] == []


@pytest.mark.parametrize("count", [2, 3])
def test_of_a_few_documents_one_is_held_out_and_never_all(tmp_path, count):
    for start in range(40):
        file = tmp_path / f"{start}.jsonl"
        file.write_text("".join(f'{{"text": "{start} {n}"}}\n' for n in range(count)))
        found = divided(file, held_out_fraction=0.05)
        assert found["held_out"] and found["train"]


def test_of_a_single_document_the_end_is_held_out(tmp_path):
    file = tmp_path / "a.txt"
    text = "".join(f"line {number}\n" for number in range(1000))
    file.write_text(text)
    found = divided(file)
    ((train, _),), ((held_out, _),) = found["train"], found["held_out"]
    assert train + held_out == text and train.endswith("\n")
    assert len(held_out) == pytest.approx(0.05 * len(text), rel=0.02)
    assert missing_files(run_of(file)) == []


def test_a_side_without_a_sample_is_found(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 10)
    (tmp_path / "b.txt").write_text("short")
    config = run_of(tmp_path / "a.txt", held_out_paths=[str(tmp_path / "b.txt")])
    (finding,) = missing_files(config)
    assert (finding.rule, finding.key) == ("TC141", "data.held_out_paths")
    assert finding.severity is Severity.warning and "6 bytes are held out" in finding.message
    config.training.evaluation_samples = 0
    assert missing_files(config) == []
    config.data.held_out_paths = [str(tmp_path / "*.txt")]
    (finding,) = missing_files(config)
    assert finding.is_error and "every file is held out" in finding.message
    config = run_of(tmp_path / "b.txt")
    (finding,) = missing_files(config)
    assert finding.is_error and "6 bytes to train on" in finding.message
    (tmp_path / "b.txt").write_text(TEXT * 10)
    (finding,) = missing_files(run_of(tmp_path / "*.txt"))
    assert "1 of 2 files held out are 50% of the text" in finding.message


def test_special_files_are_refused_before_they_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").write_text("some text " * 99)
    kinds = {
        "/proc/kmsg": "a file of the kernel",
        "/dev/zero": "a device",
        str(tmp_path / "pipe.txt"): "a pipe",
    }
    for path, kind in kinds.items():
        config = RunConfig()
        config.data = new_section("data", "files", paths=[path])
        (finding,) = missing_files(config)
        assert (finding.rule, finding.key) == ("TC115", "data.paths")
        assert finding.message == f"{path} is {kind}, no regular file"
        with pytest.raises(TrainctlError, match="no regular file"):
            split_files(config.data)
    # Beside texts they are left out.
    assert [file.name for file in find_files(str(tmp_path), (".txt",)).files] == ["a.txt"]
    assert find_files("/proc/kms*", (".txt",)).files == []
    assert find_files("a\0b", (".txt",)).files == []


def test_where_the_kernels_folders_are_ordinary_ones_files_beside_them_are_read(
    tmp_path, monkeypatch
):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(Path, "is_mount", lambda _: False)
    reading._kernel_devices.cache_clear()
    try:
        assert reading._kernel_devices() == set()
        assert [file.name for file in find_files(str(tmp_path), (".txt",)).files] == ["a.txt"]
    finally:
        reading._kernel_devices.cache_clear()


def test_a_file_that_gives_nothing_is_named_while_it_is_waited_for(monkeypatch, capfd):
    monkeypatch.setattr(silence, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(silence, "_watch", silence._StallWatch())
    said = []

    def slow(reader, file):
        yield Document("at once", file, 1)
        while not said:
            time.sleep(0.02)
            said.extend(re.findall("still reading .*", capfd.readouterr().err))
        yield Document("late", file, 2)

    monkeypatch.setattr(documents, "function_of", lambda *_: slow)
    reader = Reader(new_section("data", "files"))
    found = []
    for document in reader.read(Path("/mnt/a.jsonl")):
        found.append(document.text)
        if document.line == 1:
            time.sleep(0.2)  # the time of who uses the documents is not the file's
            assert capfd.readouterr().err == ""
    assert found == ["at once", "late"]
    assert re.fullmatch(r"still reading /mnt/a\.jsonl: nothing has come for \d+ s", said[0])
