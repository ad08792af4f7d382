"""S3 server with a bucket `corpus`, for the duration of a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server() -> Iterator[ThreadedMotoServer]:
    """Serve all S3 traffic of this process within the context."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    # Clients are cached, and would use the server of an earlier test.
    clients = fsspec.get_filesystem_class("s3")
    clients.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="corpus")
        yield server
    clients.clear_instance_cache()
    server.stop()
