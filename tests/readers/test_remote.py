"""Files under URLs: listed, read from where a connection broke, and given up in words."""

import gc
import gzip
import json
import multiprocessing
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainctl.config.registry import load_spec, new_section
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers import remote
from trainctl.readers.documents import Reader
from trainctl.readers.files import split_files
from trainctl.readers.remote import RemoteFile, list_url, version_of
from trainctl.tuning.input_files import missing_files

LINES = "".join(json.dumps({"text": f"text {n} " * 20}) + "\n" for n in range(2000)).encode()


class Server(ThreadingHTTPServer):
    """HTTP server of a folder's files by byte ranges, with faults.

    `faults` holds what happens to the next requests for bytes: a status, "break" (within the
    answer) or "silent". `asked` holds the requested ranges.
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.asked = folder, [], []
        self.over = threading.Event()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    has_ranges = True

    def log_message(self, *arguments):
        """Says nothing."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if path.is_dir():
            links = "".join(f'<a href="{each.name}">x</a>' for each in path.iterdir())
            return self.answer(200, links.encode(), {"Content-Type": "text/html"})
        if not path.is_file():
            return self.answer(404, b"")
        raw = path.read_bytes()
        headers = {"ETag": f'"{hash(raw):x}"'}
        wanted = self.headers.get("Range")
        if wanted is None or self.command == "HEAD" or not self.has_ranges:
            return self.answer(200, raw, headers)
        start, _, stop = wanted.removeprefix("bytes=").partition("-")
        first, last = int(start), min(int(stop or len(raw)), len(raw) - 1)
        self.server.asked.append((first, last))
        headers["Content-Range"] = f"bytes {first}-{last}/{len(raw)}"
        fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, int):
            return self.answer(fault, b"")
        if fault == "silent":
            self.server.over.wait(30)
            return self.connection.close()
        return self.answer(206, raw[first : last + 1], headers, breaks=fault == "break")

    def answer(self, status, body, headers=None, *, breaks=False):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if breaks else body)
        if breaks:
            self.close_connection = True


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    found = []
    monkeypatch.setattr(remote, "sleep", found.append)
    return found


def config_of(kind, *urls, **fields):
    config = RunConfig()
    config.data = new_section("data", kind, paths=list(urls), **fields)
    config.training.sequence_length = 64
    return config


def texts(files, kind="files"):
    return [each.text for each in Reader(new_section("data", kind)).documents(files)]


EXPECTED = [json.loads(line)["text"] for line in LINES.splitlines()]


def test_files_of_a_web_server_are_read_as_if_they_were_here(server):
    (server.folder / "a.jsonl").write_bytes(LINES)
    (server.folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (server.folder / "c.txt").write_bytes(b"some text " * 99)
    pq.write_table(pa.table({"text": EXPECTED}), server.folder / "d.parquet", row_group_size=100)
    config = config_of("files", server.url("*.jsonl*"), held_out_fraction=0.0)
    assert missing_files(config) == []
    files = split_files(config.data)
    assert [file.name for file in files.train] == ["a.jsonl", "b.jsonl.gz"]
    assert texts(files.train) == EXPECTED * 2
    table = config_of("parquet", server.url("d.parquet"))
    assert missing_files(table) == []
    assert texts(split_files(table.data).train, "parquet") == EXPECTED
    # A folder is a page of links, and a query is a part of the name.
    folder = config_of("files", server.url(""), held_out_fraction=0.0)
    assert [file.name for file in split_files(folder.data).train] == [
        "a.jsonl",
        "b.jsonl.gz",
        "c.txt",
    ]
    ((signed,), is_folder) = list_url(server.url("c.txt?key=secret"))
    assert signed.name == "c.txt" and not is_folder and texts([signed]) == ["some text " * 99]


def test_what_is_wrong_there_is_found_before_a_launch(server):
    (server.folder / "a.jsonl").write_bytes(b'{"body": "text"}\n')
    (server.folder / "b.jsonl").write_bytes(gzip.compress(LINES[:9000])[:-9])
    urls = [server.url("*.jsonl"), server.url("none.txt"), "nowhere://a/b"]
    found = missing_files(config_of("files", *urls))
    text = "\n".join(finding.message for finding in found)
    assert {finding.rule for finding in found} == {"TC115", "TC138", "TC139"}
    assert "no file matches" in text and "cannot read nowhere://a/b" in text
    assert "b.jsonl is cut off" in text and "a.jsonl:1: no text under 'text'" in text


@pytest.mark.parametrize("fault", [500, 503, "break"])
def test_reading_continues_after_a_broken_connection(server, waits, fault, capsys):
    (server.folder / "a.jsonl").write_bytes(LINES)
    files, _ = list_url(server.url("a.jsonl"))
    server.faults += [fault, fault]
    assert texts(files) == EXPECTED
    assert waits == [1.0, 2.0]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "attempt 2 of 6 in 1 s" in said[0] and files[0].url in said[0]


def test_a_server_that_stays_away_ends_in_words(server, waits):
    (server.folder / "a.jsonl").write_bytes(LINES)
    files, _ = list_url(server.url("a.jsonl"))
    server.faults += [503] * 99
    with pytest.raises(TrainctlError, match=r"cannot read http.*/a\.jsonl at byte 0 after 6") as no:
        texts(files)
    assert no.value.exit_code == ExitCode.environment and "503" in no.value.message
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_server_that_says_nothing_is_not_waited_for_for_ever(server, waits, monkeypatch):
    monkeypatch.setattr(remote, "READ_TIMEOUT_SECONDS", 0.3)
    (server.folder / "a.jsonl").write_bytes(LINES)
    files, _ = list_url(server.url("a.jsonl"))
    server.faults += ["silent"]
    assert texts(files) == EXPECTED and waits == [1.0]


def test_another_file_under_the_name_is_refused(server, waits):
    file = server.folder / "a.jsonl"
    file.write_bytes(LINES)
    files, _ = list_url(server.url("a.jsonl"))
    before = version_of(files[0])
    file.write_bytes(LINES[:-2] + b"?\n")
    with pytest.raises(TrainctlError, match="is not what it was when it was listed: version"):
        texts(files)
    again, _ = list_url(server.url("a.jsonl"))
    assert version_of(again[0]) != before and again[0].size == len(LINES)
    file.write_bytes(LINES[:-2])
    with pytest.raises(TrainctlError, match=f"{len(LINES) - 2:,} bytes, not {len(LINES):,}"):
        texts(again)
    assert waits == []


def test_a_server_without_ranges_is_named(server, waits, monkeypatch):
    monkeypatch.setattr(Handler, "has_ranges", False)
    (server.folder / "a.txt").write_bytes(b"short")
    assert texts(list_url(server.url("a.txt"))[0]) == ["short"]
    (server.folder / "a.jsonl").write_bytes(LINES * 30)
    files, _ = list_url(server.url("a.jsonl"))
    with pytest.raises(TrainctlError, match="its server gives files as a whole only"):
        texts(files)
    assert waits == []


def test_ranges_of_a_remote_file_have_each_line_once(server):
    (server.folder / "a.jsonl").write_bytes(LINES)
    (file,), _ = list_url(server.url("a.jsonl"))
    ranges = load_spec("data", "files").ranges(file, 100_000)
    assert len(ranges) > 2
    reader = Reader(new_section("data", "files"))
    assert [each.text for span in ranges for each in reader.read(file, span)] == EXPECTED


def test_a_process_that_was_forked_reads_too(server):
    (server.folder / "a.jsonl").write_bytes(LINES)
    files, _ = list_url(server.url("a.jsonl"))
    assert texts(files) == EXPECTED
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(texts, [files] * 4).get(60) == [EXPECTED] * 4


def test_what_is_not_there_is_not_tried_again(server, waits):
    with pytest.raises(TrainctlError, match="FileNotFoundError"):
        texts([RemoteFile(server.url("none.txt"), 9)])
    assert waits == []


@contextmanager
def in_memory(**files):
    store = fsspec.filesystem("memory")
    for name, raw in files.items():
        store.pipe(f"/corpus/{name.replace('__', '/')}", raw)
    yield
    store.rm("/corpus", recursive=True)


def test_a_remote_folder_is_as_a_folder_here(tmp_path):
    names = {f"{n}.txt": f"text {n} ".encode() * 50 for n in range(12)}
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    for name, raw in names.items():
        (tmp_path / "corpus" / name).write_bytes(raw)
    hidden = {".git__x.txt": b"x", "deep__.y.txt": b"x", "z.py": b"x"}
    with in_memory(**names, **hidden):
        config = config_of("files", "memory://corpus", held_out_fraction=0.2)
        there = split_files(config.data)
        here = split_files(
            new_section("data", "files", paths=[str(tmp_path / "corpus")], held_out_fraction=0.2)
        )
        assert [file.name for file in there.held_out] == [file.name for file in here.held_out]
        assert texts(there.train) == texts(here.train)
        (finding,) = missing_files(config)
        assert finding.rule == "TC140" and "left out are 1 .py" in finding.message
        # Both at once: this machine's come first.
        config.data.paths.append(str(tmp_path / "corpus" / "3.txt"))
        files = split_files(config.data)
        assert len(files.train) + len(files.held_out) == 13
        glob = config_of("files", "memory://corpus/1*.txt")
        assert len(split_files(glob.data).train) == 3


def test_a_protocol_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    (finding,) = missing_files(config_of("files", "gs://bucket/*.txt"))
    assert finding.hint == "pip install 'trainctl[gcs]'" and finding.exit_code == 4


def test_a_login_in_the_configuration_of_fsspec_is_kept(monkeypatch):
    own = {"http": {"client_kwargs": {"auth": "mine", "timeout": 1}}}
    monkeypatch.setattr(fsspec.config, "conf", own)
    file_system, _ = remote.file_system_of("http://example.invalid/a.jsonl")
    assert file_system.client_kwargs["auth"] == "mine"
    assert file_system.client_kwargs["timeout"].sock_read == remote.READ_TIMEOUT_SECONDS


NO_DETAILS = ("jupyter", "reference", "github", "dbfs", "dir", "generic", "filecache", "data")


@pytest.mark.parametrize("url", [f"{each}://a/x.txt" for each in (*NO_DETAILS, "zip", "tar")])
def test_a_url_that_lacks_what_its_file_system_needs_is_an_error_of_the_user(url, waits):
    (finding,) = missing_files(config_of("files", url))
    assert finding.rule == "TC115" and finding.exit_code == ExitCode.bad_input
    assert finding.message.startswith(f"cannot read {url}: ") and waits == []


def test_a_file_system_that_is_made_by_half_says_nothing_on_its_way_out(capfd):
    (finding,) = missing_files(config_of("files", "ftp://"))
    assert "missing 1 required positional argument: 'host'" in finding.message
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_server_that_refuses_connections_is_named_without_its_secrets(waits, capsys):
    for url in ("ftp://me:pw@127.0.0.1:1/a.txt", "http://127.0.0.1:1/a.txt?sig=pw&part=1"):
        waits.clear()
        (finding,) = missing_files(config_of("files", url))
        assert finding.exit_code == ExitCode.environment and len(waits) == remote.ATTEMPTS - 1
        assert "after 6 attempts" in finding.message and "127.0.0.1:1/a.txt" in finding.message
        said = finding.message + capsys.readouterr().err
        assert "pw" not in said and "redacted" in said


class Broken(fsspec.AbstractFileSystem):
    """A file system that raises what a test sets, when it is made and for every call."""

    protocol = "broken"
    cachable = False
    at_start = error = None

    def __init__(self, **options):
        super().__init__(**options)
        if Broken.at_start:
            raise Broken.at_start

    def info(self, path, **options):
        raise Broken.error


@pytest.mark.parametrize(
    ("error", "code", "tries"),
    [
        (OSError("Unable to load libjvm"), ExitCode.environment, 1),
        (OSError(5, "it is ill"), ExitCode.environment, remote.ATTEMPTS),
        (ConnectionResetError("gone"), ExitCode.environment, remote.ATTEMPTS),
        (PermissionError(13, "not yours"), ExitCode.environment, 1),
        (RuntimeError("odd"), ExitCode.environment, remote.ATTEMPTS),
        (TypeError("no user"), ExitCode.bad_input, 1),
        (ImportError("no client"), ExitCode.environment, 1),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else None,
)
def test_whatever_a_file_system_raises_is_an_error_of_its_kind(
    monkeypatch, waits, error, code, tries
):
    fsspec.register_implementation("broken", Broken, clobber=True)
    for attribute in ("at_start", "error"):
        waits.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Broken, attribute, error)
            with pytest.raises(TrainctlError, match=r"broken://host/a\.txt") as caught:
                list_url("broken://host/a.txt")
        assert caught.value.exit_code == code and len(waits) == tries - 1
