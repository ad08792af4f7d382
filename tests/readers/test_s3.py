"""A corpus in a bucket of a server that speaks S3, as everything that goes there is read."""

import gzip
import io
import json

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.errors import TrainctlError
from trainctl.readers import remote
from trainctl.readers.documents import Reader
from trainctl.readers.files import split_files
from trainctl.tuning.input_files import missing_files

TEXTS = [f"text {n} " * 20 for n in range(2000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture(scope="module")
def bucket():
    """Puts an object into the bucket `corpus`."""
    variables = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**variables, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="corpus")
        yield lambda key, body: client.put_object(Bucket="corpus", Key=key, Body=body)
    server.stop()


def read(kind, *urls):
    config = RunConfig()
    config.data = new_section("data", kind, paths=[*urls], held_out_fraction=0.0)
    config.training.sequence_length = 64
    assert missing_files(config) == []
    files = split_files(config.data).train
    return files, [each.text for each in Reader(config.data).documents(files)]


def test_objects_are_read_as_if_they_were_files_here(bucket):
    bucket("text/a.jsonl.gz", gzip.compress(LINES))
    bucket("text/deep/b.jsonl", LINES)
    for urls in (
        ["s3://corpus/text"],
        ["s3://corpus/text/"],
        ["s3://corpus/text/*.gz", "s3://corpus/text/**/b.jsonl"],
    ):
        files, texts = read("files", *urls)
        assert [file.url for file in files] == [
            "s3://corpus/text/a.jsonl.gz",
            "s3://corpus/text/deep/b.jsonl",
        ]
        assert all(file.version for file in files) and texts == TEXTS * 2
    table = io.BytesIO()
    pq.write_table(pa.table({"text": TEXTS}), table, row_group_size=100)
    bucket("table.parquet", table.getvalue())
    assert read("parquet", "s3://corpus/table.parquet")[1] == TEXTS
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, pa.schema({"text": pa.string()})) as out:
        out.write_table(pa.table({"text": TEXTS}), max_chunksize=100)
    bucket("saved/data-00000-of-00001.arrow", stream.getvalue())
    bucket("saved/cache-1.arrow", stream.getvalue())
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    bucket("saved/state.json", json.dumps(state).encode())
    assert read("arrow", "s3://corpus/saved")[1] == TEXTS


def test_an_object_that_is_replaced_is_another(bucket):
    bucket("c.jsonl", LINES)
    files, _ = read("files", "s3://corpus/c.jsonl")
    bucket("c.jsonl", LINES[:-2] + b" \n")
    with pytest.raises(TrainctlError, match="is not what it was when it was listed: version"):
        list(Reader(new_section("data", "files")).documents(files))


def test_what_is_not_there_is_named(bucket, monkeypatch):
    monkeypatch.setattr(remote, "sleep", lambda seconds: pytest.fail("it waits"))
    for url in ("s3://corpus/none.txt", "s3://corpus/none/*", "s3://nowhere/*.txt"):
        config = RunConfig()
        config.data = new_section("data", "files", paths=[url])
        (finding,) = missing_files(config)
        assert finding.rule == "TC115" and url in finding.message
