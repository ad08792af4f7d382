"""Kills of a launcher, of the process that sends to its mirror, and of the store.

A trial is one run of stand-in ranks that save small checkpoints, one SIGKILL at a random moment,
and the rest of the run. What is listed is verified after the kill and at the end.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import fsspec
from botocore.config import Config
from mirrors import unlisted_parts
from ports import reserved_port
from supervised import Launch, Launches, carriers

from trainctl.config.schema import CheckpointConfig
from trainctl.launchers.processes import send_rest
from trainctl.mirror.fetch import Mirror, fetch_run
from trainctl.mirror.index import Store, index_keys
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import verify
from trainctl.runs.mirror_state import MIRROR, read_mirror_state
from trainctl.runs.status import Request, file_request

VICTIMS = ("launcher", "sender", "store")
KEEP = 2
BUCKET = "kills"
_SECONDS = 60.0
_BEHAVIOUR = "forever,saves,obliging"
_SHARE_LISTED = 0.7
"""Share of trials whose kill waits until something is listed."""


class StoreServer:
    """A server that speaks S3, in a process that can be killed and started again.

    Args:
        kind: `moto`, which loses everything when it is killed, or `localbucket` (PyPI), which keeps
            objects in files.
        folder: Folder for the files.
    """

    def __init__(self, kind: str, port: int, folder: Path) -> None:
        self._log = folder / "store.log"
        data = folder / "store"
        data.mkdir(parents=True)
        self._command = {
            "moto": ["-m", "moto.server", "-p", str(port)],
            "localbucket": ["-m", "localbucket", "--port", str(port), str(data)],
        }[kind]
        self._client = boto3.client(
            "s3", config=Config(retries={"max_attempts": 0}, connect_timeout=1, read_timeout=5)
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._command], stdout=log, stderr=log
            )
        wait_for(self._has_bucket)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _has_bucket(self) -> bool:
        try:
            if not any(each["Name"] == BUCKET for each in self._client.list_buckets()["Buckets"]):
                self._client.create_bucket(Bucket=BUCKET)
        except Exception:  # it is not up yet
            return False
        return True


@contextmanager
def store_server(kind: str, folder: Path) -> Iterator[StoreServer]:
    """Serve all S3 traffic of this process and its children within the context."""
    with reserved_port() as port:
        variables = {
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        clients: Any = fsspec.get_filesystem_class("s3")
        clients.clear_instance_cache()
        server = StoreServer(kind, port, folder)
        try:
            yield server
        finally:
            server.kill()
            clients.clear_instance_cache()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return the first true value of the condition."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{condition} not within {_SECONDS:g} s")


def trial(server: StoreServer, folder: Path, victims: Sequence[str], seed: int) -> str:
    """Kill processes of a run at random moments, finish the run, and return what was listed then.

    Raises:
        AssertionError: Something was listed and not whole, or something was left half.
    """
    chance, said = random.Random(seed), []
    url = f"s3://{BUCKET}/runs/{folder.name}"
    settings = CheckpointConfig(keep=KEEP, mirror=url, mirror_bandwidth=3 << 20)
    launches = Launches(folder)
    try:
        run = launches.make_run(checkpoint=settings)
        launch = launches.start(_BEHAVIOUR, run=run)
        for victim in victims:
            launch.wait_for(partial(_may_be_struck, launch))
            if chance.random() < _SHARE_LISTED:
                launch.wait_for(lambda: read_mirror_state(run).stored)
            time.sleep(chance.uniform(0.0, 3.0))
            strike(launch, server, victim)
            said.append(f"{victim} killed with {check_listed(url)} listed")
            if victim == "launcher":
                launch.process.wait()
                wait_for(partial(_is_gone, launch))
                launch = launches.start(_BEHAVIOUR, run=run)
        before = len(launch.events("step"))
        launch.wait_for(lambda: len(launch.events("step")) > before + 15)
        check_listed(url)
        file_request(run, Request.stop)
        launch.end()
        check_end(run, url, folder)
    finally:
        launches.close()
    return ", ".join(said)


def _may_be_struck(launch: Launch) -> bool:
    return sender_of(launch) is not None and bool(list_checkpoints(launch.run))


def _is_gone(launch: Launch) -> bool:
    return not carriers(launch.identity)


def sender_of(launch: Launch) -> int | None:
    """Return the pid of the process that sends to the mirror."""
    found = [pid for pid, line in carriers(launch.identity).items() if "trainctl.mirror" in line]
    return found[0] if found else None


def strike(launch: Launch, server: StoreServer, victim: str) -> None:
    """Kill the launcher, the sender, or the store, which is started again."""
    if victim == "store":
        server.kill()
        time.sleep(0.5)
        server.start()
        return
    pid = launch.process.pid if victim == "launcher" else sender_of(launch)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def check_listed(url: str) -> list[str]:
    """Verify everything that is listed now, and return the names."""
    store = Store(url)
    while True:
        if not index_keys(store):
            return []
        mirror = Mirror(url)
        problems = [
            problem
            for each in mirror.index.checkpoints
            for problem in mirror.verify(each, lambda *_: None)
        ]
        if not problems:
            return [each.name for each in mirror.index.checkpoints]
        # A later index may have removed what this one listed.
        assert not index_keys(store) or Mirror(url).index != mirror.index, problems


def check_end(run: RunPaths, url: str, folder: Path) -> None:
    """Check that the mirror has what the run kept, and that nothing is left half anywhere."""
    assert send_rest(run, MIRROR, config_of(run)) == 0, run.companion(MIRROR).log.read_text()[
        -2000:
    ]
    newest = [info.path.name for info in list_checkpoints(run)][-KEEP:]
    assert check_listed(url) == newest
    assert not unlisted_parts(url)
    assert len(index_keys(Store(url))) == 1
    left = [path for path in run.root.rglob("*.tmp") if "heartbeats" not in path.parts]
    assert not left, left
    fetched = fetch_run(url, run_dir=folder / "fetched")
    (info,) = list_checkpoints(fetched)
    assert info.path.name == newest[-1] and verify(info.path) == []
