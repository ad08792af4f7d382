"""Model hub in this process, with what uploads and loads use of the Hugging Face hub's API.

It keeps what it is given: a commit appears whole or not at all, and files of LFS are those that
were put before. `HubServer.fail` has requests fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test0123456789"
LFS = (".safetensors", ".png", ".bin")
"""Files that go by LFS, as `.gitattributes` of a new repository says."""


class Repository:
    """Repository of a model, with its commits."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.commit({".gitattributes": b"*.safetensors filter=lfs\n"})

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit with these files; return its id."""
        content = json.dumps([len(self.commits), sorted(files)]).encode()
        self.commits.append((hashlib.sha1(content).hexdigest(), files))
        return self.commits[-1][0]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return id and files of a commit, or of `main`."""
        return next(c for c in reversed(self.commits) if revision in ("main", c[0]))


class HubServer(ThreadingHTTPServer):
    """The hub, at `url`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """Content of LFS files, by SHA-256."""
        self.requests: list[str] = []
        """Method and path of each request."""
        self.fail: str | None = None
        """Pattern of the requests that are answered with status 403."""
        self.corrupt = False
        """Whether content that was put is kept with another last byte."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, name: str) -> dict[str, bytes]:
        """Return the files of a repository's newest commit."""
        return self.repositories[name].at("main")[1]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def _dispatch(self) -> None:
        path = unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.server.requests.append(f"{self.command} {path}")
        if self.server.fail and re.search(self.server.fail, f"{self.command} {path}"):
            return self._answer(403, {"error": "planted"})  # 5xx would be tried again
        is_signed = path.startswith("/lfs/")  # the address itself is the permission
        if not is_signed and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials"})
        for pattern, method in ROUTES:
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found:
                return method(self, body, **found.groupdict())
        return self._answer(404, {"error": f"no {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = _dispatch

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repository(self, name: str) -> Repository | None:
        found = self.server.repositories.get(name)
        if found is None:
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return found

    def whoami(self, body: bytes) -> None:
        self._answer(200, {"type": "user", "name": "me", "orgs": []})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            return self._answer(409, {"error": "You already created this model", "url": url})
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.server.repositories[name] = Repository(private)
        return self._answer(200, {"url": url, "id": "1", "name": name})

    def validate(self, body: bytes) -> None:
        self._answer(200, {"errors": [], "warnings": []})

    def info(self, body: bytes, name: str, revision: str = "main") -> None:
        repository = self._repository(name)
        if repository is not None:
            commit, files = repository.at(revision)
            listed = [{"rfilename": path, **self._entry(path, files[path])} for path in files]
            found = {"id": name, "sha": commit, "private": repository.private, "siblings": listed}
            self._answer(200, found)

    def tree(self, body: bytes, name: str, revision: str) -> None:
        repository = self._repository(name)
        if repository is not None:
            _, files = repository.at(revision)
            self._answer(
                200, [{"type": "file", "path": p, **self._entry(p, files[p])} for p in files]
            )

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry = {"blobId": blob, "oid": blob, "size": len(content)}
        if path.endswith(LFS):
            sha = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": sha, "oid": sha, "size": len(content), "pointerSize": 130}
        return entry

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        repository = self._repository(name)
        if repository is not None:
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._answer(200, {"files": modes})

    def batch(self, body: bytes, name: str) -> None:
        objects = []
        for each in json.loads(body)["objects"]:
            action = {"upload": {"href": f"{self.server.url}/lfs/{each['oid']}"}}
            is_known = each["oid"] in self.server.objects
            objects.append(each | ({} if is_known else {"actions": action}))
        self._answer(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer(400, {"error": "other content"})
        self.server.objects[oid] = body[:-1] + b"?" if self.server.corrupt else body
        return self._answer(200, {})

    def commit(self, body: bytes, name: str, revision: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        files = dict(repository.at(revision)[1])
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        made = repository.commit(files)
        url = f"{self.server.url}/{name}/commit/{made}"
        self._answer(200, {"success": True, "commitOid": made, "commitUrl": url})

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        commit, files = repository.at(revision)
        if path not in files:
            self._answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            return
        tag = hashlib.sha256(files[path]).hexdigest()
        self._answer(200, files[path], ETag=f'"{tag}"', X_Repo_Commit=commit)


NAME, REVISION = r"(?P<name>[\w.-]+/[\w.-]+)", r"(?P<revision>[\w.-]+)"
ROUTES = (
    ("GET /api/whoami-v2", _Handler.whoami),
    ("POST /api/repos/create", _Handler.create),
    ("POST /api/validate-yaml", _Handler.validate),
    (f"(GET|HEAD) /api/models/{NAME}", _Handler.info),
    (f"GET /api/models/{NAME}/revision/{REVISION}", _Handler.info),
    (f"GET /api/models/{NAME}/tree/{REVISION}/?", _Handler.tree),
    (f"POST /api/models/{NAME}/preupload/{REVISION}", _Handler.preupload),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/(?P<oid>\w+)", _Handler.put),
    (f"POST /api/models/{NAME}/commit/{REVISION}", _Handler.commit),
    (f"(GET|HEAD) /{NAME}/resolve/{REVISION}/(?P<path>.+)", _Handler.resolve),
)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve an empty hub."""
    with HubServer() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
