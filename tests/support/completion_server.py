"""Server of our own that speaks the part of vLLM's interface that rollouts use. It is not vLLM.

It holds a transformers model, which `reload_weights` replaces, and samples without a cache.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class CompletionServer(ThreadingHTTPServer):
    """The server.

    Attributes:
        seen: Paths and bodies of all requests.
        failures: Answers (status, text) to the next requests, in place of the right ones.
        leaves_out: Field of a completion that is missing.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model: Any = None
        self.is_paused = False
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.failures: list[tuple[int, str]] = []
        self.leaves_out = ""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        match path:
            case "/v1/models":
                return {"object": "list", "data": [{"id": "served"}]}
            case "/pause?mode=wait" | "/resume":
                self.is_paused = path != "/resume"
            case "/collective_rpc":
                assert self.is_paused and body["method"] == "reload_weights"
                folder = body["kwargs"]["weights_path"]
                self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            case "/v1/completions":
                assert not self.is_paused and body["model"] == "served"
                return {"choices": [self._completion(body)]}
        return {}

    @torch.no_grad()
    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["logprobs"] == 0 and body["return_token_ids"]
        ids, logs = list(body["prompt"]), []
        generator = torch.Generator().manual_seed(body["seed"])
        reason = "length"
        while len(logs) < body["max_tokens"] and reason == "length":
            if self.model is None:
                scores = torch.zeros(300)
            else:
                scores = self.model(torch.tensor([ids])).logits[0, -1]
            found = (scores / body["temperature"]).log_softmax(dim=-1)
            token = int(torch.multinomial(found.exp(), 1, generator=generator))
            ids.append(token)
            logs.append(float(found[token]))
            reason = "stop" if token in body["stop_token_ids"] else "length"
        choice = {
            "token_ids": ids[len(body["prompt"]) :],
            "logprobs": {"token_logprobs": logs},
            "finish_reason": reason,
        }
        return {name: value for name, value in choice.items() if name != self.leaves_out}


class _Handler(BaseHTTPRequestHandler):
    server: CompletionServer

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self._reply(json.loads(self.rfile.read(length)))

    def _reply(self, body: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.seen.append((self.path, body))
            if self.server.failures:
                status, text = self.server.failures.pop(0)
            else:
                status, text = 200, json.dumps(self.server.answer(self.path, body))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def completion_server() -> Iterator[CompletionServer]:
    """Run a server in a thread within the context."""
    with CompletionServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
