"""Client of a rollout server, against a server of our own that speaks vLLM's interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completion_server import CompletionServer, completion_server

from trainctl.errors import ExitCode, TrainctlError
from trainctl.train.rollouts import Completion, RolloutRow, Sampler
from trainctl.train.rollouts import server as client
from trainctl.train.rollouts.generate import Generation
from trainctl.train.rollouts.server import RolloutServer

ROWS = [RolloutRow((1, 2), number, sample) for number in range(3) for sample in range(2)]
SETTINGS = Generation(
    max_tokens=12, batch_size=4, prefill_tokens=64, ends=range(20), vocab_size=300
)


class OneRank:
    """The only process of a run."""

    is_first = True

    def broadcast_from_first(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompletionServer]:
    monkeypatch.setattr(client, "PAUSES", (0.0, 0.0))
    with completion_server() as running:
        yield running


def generate(url: str, sampler: Sampler | None = None, **more: Any) -> list[Completion]:
    found = RolloutServer(url, OneRank())
    return found.generate(ROWS, sampler or Sampler(seed=5), SETTINGS, **more)


def test_answers_are_a_function_of_seed_prompt_and_sample(server: CompletionServer) -> None:
    kept: list[tuple[int, int]] = []
    lock = threading.Lock()

    def keep(row: RolloutRow, answer: Completion) -> None:
        with lock:
            kept.append((row.number, row.sample))

    first, again = generate(server.url, keep=keep), generate(f"{server.url}/")
    assert sorted(kept) == [(row.number, row.sample) for row in ROWS]
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert one.is_finished == (one.ids[-1] < 20)
        assert len(one.ids) == len(one.log_probabilities)
    others = generate(server.url, Sampler(seed=6))
    assert [each.ids.tolist() for each in others] != [each.ids.tolist() for each in first]
    assert len({tuple(each.ids.tolist()) for each in first}) == len(ROWS)
    bodies = [body for path, body in server.seen if path == "/v1/completions"]
    assert bodies[0]["stop_token_ids"] == list(range(20))
    # A server takes what is not said from the model's generation_config.json.
    assert (bodies[0]["min_p"], bodies[0]["repetition_penalty"]) == (0.0, 1.0)
    assert all(0 <= body["seed"] < 2**63 for body in bodies)


def test_a_busy_server_is_asked_again(server: CompletionServer) -> None:
    server.failures = [(503, "loading"), (429, "busy")]
    assert len(generate(server.url)) == len(ROWS)


@pytest.mark.parametrize(
    ("failures", "message", "hint"),
    [
        ([(503, "loading")] * 99, "answered by 503 loading", "its log says more"),
        ([(401, "no key")], "/v1/models is answered by 401 no key", "VLLM_API_KEY"),
        ([(400, "too long")], "400 too long", "log"),
    ],
)
def test_a_refusal_names_the_server_and_the_reason(
    server: CompletionServer, failures: list[tuple[int, str]], message: str, hint: str
) -> None:
    server.failures = failures
    with pytest.raises(TrainctlError) as raised:
        generate(server.url)
    assert message in str(raised.value)
    assert f"objective.rollout_url={server.url}" in str(raised.value)
    assert hint in str(raised.value.hint)


@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
def test_a_server_without_token_ids_or_log_probabilities_is_refused(
    server: CompletionServer, field: str
) -> None:
    server.leaves_out = field
    with pytest.raises(TrainctlError, match="no token ids and log-probabilities") as raised:
        generate(server.url)
    assert "0.10.2" in str(raised.value.hint)


def test_a_server_that_is_not_there_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.0,))
    with pytest.raises(TrainctlError, match="start the server") as raised:
        generate("http://me:secret@127.0.0.1:9")
    assert "secret" not in str(raised.value)
    assert "127.0.0.1:9" in str(raised.value)


def test_a_server_that_takes_no_weights_says_how_it_would(
    server: CompletionServer, tmp_path: Path
) -> None:
    server.failures = [(404, "Not Found")]
    with pytest.raises(TrainctlError, match="/pause is answered by 404") as raised:
        RolloutServer(server.url, OneRank())._load(tmp_path)
    assert "VLLM_SERVER_DEV_MODE=1" in str(raised.value.hint)


def test_a_disk_error_of_the_first_rank_is_an_error_of_all() -> None:
    def write() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(TrainctlError, match="No space left") as raised:
        client.on_first_rank(OneRank(), write, lambda: None)
    assert raised.value.exit_code is ExitCode.environment


def test_a_key_is_sent(server: CompletionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    seen: list[Any] = []
    real = client.urlopen

    def watched(request: Any, **more: Any) -> Any:
        seen.append(request.get_header("Authorization"))
        return real(request, **more)

    monkeypatch.setattr(client, "urlopen", watched)
    assert generate(server.url)[0].ids.size
    assert set(seen) == {"Bearer k"}
