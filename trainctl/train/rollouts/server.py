"""Rollouts by a vLLM server that the user has started (`objective.rollout=vllm`).

Answers come from its OpenAI-compatible completions with token ids (vLLM 0.10.2 or later; fields of
`CompletionRequest`, vllm/entrypoints/openai/completion/protocol.py). New weights are a directory of
transformers in the run's folder, which the server's workers read by `reload_weights`: a call that
servers take with `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import torch

from trainctl.config.secrets import redact_text
from trainctl.data.corpora import corpus_digests
from trainctl.engines.process import Process
from trainctl.errors import MachineError, TrainctlError, describe_exception
from trainctl.plans.settings import number_formats
from trainctl.runs.layout import RunPaths
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.checkpoint.save import rank_part, write_checkpoint
from trainctl.train.export.directory import export
from trainctl.train.models.model import TORCH_TYPES
from trainctl.train.rollouts import Completion, RolloutRow, Sampler
from trainctl.train.rollouts.generate import Generation
from trainctl.train.session import Session

Result = TypeVar("Result")

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key of the server, by vLLM's own name."""

SECONDS = 600.0
"""Longest time of a request: an answer that waits for others, or the reading of weights."""

POLL_SECONDS = 1.0
"""Longest time for which the ranks wait for the first one without a sign of life."""

_AT_ONCE = 1 << 22
"""Weights that are summed at a time: their copy in fp64 has 32 MiB."""

PAUSES = 1.0, 4.0, 16.0
"""Seconds before each further attempt of a request that did not reach the server, or that it was
too busy for.
"""


class RolloutServer:
    """Client of a vLLM server; the first rank speaks to it.

    Args:
        url: Address of the server, without a path.
        at_once: Most requests at a time.
    """

    def __init__(self, url: str, process: Process, *, at_once: int = 64) -> None:
        self._url, self._process, self._at_once = url.rstrip("/"), process, at_once
        self._model, self._served = "", [math.nan]  # sums of the weights that it has read

    def send_weights(self, session: Session, beat: Callable[[str], None]) -> None:
        """Write the weights and let the server read them, unless it has the same; on all ranks
        together.

        Args:
            beat: Called on all ranks every few seconds with what is being done.

        Raises:
            TrainctlError: They cannot be written, or the server does not read them; on all ranks.
        """
        sums = weights_sums(session)  # an evaluation may be of their average at the same step
        if sums == self._served:
            return
        out = write_weights(session, beat)
        on_first_rank(
            self._process, partial(self._load, out), partial(beat, "the server reads the weights")
        )
        self._served = sums

    def _load(self, folder: Path) -> None:
        # If this fails, the server stays paused: half of its weights may be new.
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._ask("/pause?mode=wait", {})
        self._ask("/collective_rpc", {**reload, "timeout": SECONDS})
        self._ask("/reset_prefix_cache", {})  # its keys and values are of the weights before
        self._ask("/resume", {})
        shutil.rmtree(folder.parent, ignore_errors=True)

    def generate(
        self,
        rows: Sequence[RolloutRow],
        sampler: Sampler,
        settings: Generation,
        keep: Callable[[RolloutRow, Completion], None] = lambda row, answer: None,
        beat: Callable[[str], None] = lambda doing: None,
    ) -> list[Completion]:
        """Return the answers of all rows, in their order; on all ranks together.

        Args:
            keep: Called on the first rank, in a thread, with each answer as soon as it has ended.
            beat: Called on all ranks every few seconds with what is being done.

        Raises:
            TrainctlError: The server does not answer, or not with what is asked; on all ranks.
        """

        def ask_all() -> list[Completion]:
            ask = partial(self._complete, sampler, settings)
            found: dict[int, Completion] = {}
            with ThreadPoolExecutor(self._at_once) as pool:
                asked = {pool.submit(ask, row): index for index, row in enumerate(rows)}
                try:
                    for future in as_completed(asked):
                        index = asked[future]
                        found[index] = future.result()
                        keep(rows[index], found[index])
                finally:
                    pool.shutdown(cancel_futures=True)
            return [found[index] for index in range(len(rows))]

        return on_first_rank(self._process, ask_all, partial(beat, "the server samples"))

    def _complete(self, sampler: Sampler, settings: Generation, row: RolloutRow) -> Completion:
        place = f"{sampler.seed} {row.number} {row.sample}".encode()
        answer = self._ask(
            "/v1/completions",
            {
                "model": self._name(),
                "prompt": list(row.prompt),
                "max_tokens": settings.max_tokens,
                "temperature": sampler.temperature,
                "top_p": sampler.top_p,
                "top_k": sampler.top_k,
                # Otherwise the model's generation_config.json would give these.
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "seed": int.from_bytes(hashlib.sha256(place).digest()[:7], "big"),
                "stop_token_ids": sorted(settings.ends),
                "logprobs": 0,  # of the sampled token alone
                "return_token_ids": True,
            },
        )
        try:
            (choice,) = answer["choices"]
            ids = np.array(choice["token_ids"], dtype=np.int64)
            logs = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32)
            is_finished = choice["finish_reason"] == "stop"
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(
                "its completions have no token ids and log-probabilities",
                "vLLM 0.10.2 or later returns both",
            ) from error
        if not 0 < len(ids) == len(logs):
            raise self._error(
                f"it returned {len(ids)} tokens with {len(logs)} log-probabilities",
                "a server without speculative decoding",
            )
        return Completion(ids, logs, is_finished)

    def _name(self) -> str:
        """Return the name of the served model."""
        if not self._model:
            listed = self._ask("/v1/models", None).get("data") or [{}]
            self._model = str(listed[0].get("id", ""))
        return self._model

    def _ask(self, path: str, fields: dict[str, Any] | None) -> dict[str, Any]:
        """Return the answer to a request: a POST of `fields` as JSON, or a GET.

        Raises:
            TrainctlError: The server refuses it, or does not answer.
        """
        body = None if fields is None else json.dumps(fields).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = Request(f"{self._url}{path}", body, headers)
        for pause in (*PAUSES, None):
            try:
                with urlopen(request, timeout=SECONDS) as answer:
                    text = answer.read()
                found = json.loads(text) if text.strip() else {}
                return found if isinstance(found, dict) else {}
            except HTTPError as error:
                detail = error.read(1000).decode(errors="replace").strip()
                what = f"{path.partition('?')[0]} is answered by {error.code} {detail}"
                is_busy = error.code in (429, 502, 503, 504)
                if pause is None or not is_busy:
                    raise self._error(what, _hint_for(path, error.code)) from error
            except (URLError, HTTPException, OSError, ValueError) as error:
                if pause is None:
                    reason = getattr(error, "reason", error)
                    raise self._error(
                        f"{reason}", "start the server, or correct objective.rollout_url"
                    ) from error
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _error(self, what: str, hint: str) -> TrainctlError:
        return MachineError(
            redact_text(f"the server of objective.rollout_url={self._url} fails: {what}"),
            hint=hint,
        )


def _hint_for(path: str, code: int) -> str:
    """Return what to do about a refused request."""
    if code in (401, 403):
        return f"set {KEY_VARIABLE} to the key of the server"
    if code == 404 and not path.startswith("/v1/"):
        return "start the server with VLLM_SERVER_DEV_MODE=1, which lets it take new weights"
    return "its log says more"


def write_weights(session: Session, beat: Callable[[str], None] = lambda doing: None) -> Path:
    """Write the current weights as a directory that transformers loads; on all ranks together.

    They pass through a weights-only checkpoint, which knows no layout and merges adapters. The
    caller removes the parent of the directory.

    Raises:
        TrainctlError: A rank cannot write; on all ranks.
    """
    config, process, step = session.plan.config, session.process, session.progress.step
    dtype = TORCH_TYPES[number_formats(config.precision).weights]
    place = RunPaths(session.run.root / "served")
    out = place.root / f"step-{step:08d}"
    if process.is_first:
        shutil.rmtree(place.root, ignore_errors=True)  # left by a kill
        place.root.mkdir()
        if session.run.base.exists():
            shutil.copy(session.run.base, place.base)
    process.barrier()
    facts = {
        **asdict(session.progress),
        "weights_only": True,
        "metrics": {},
        **corpus_digests(session.corpora),
        "shapes": session.shapes,
        **session.origin,
    }
    part = rank_part(session.state, session.saved_buffers, dtype)
    once = replace(config.checkpoint, mirror=None)
    saved, _ = write_checkpoint(place, process, part, facts, once)
    doing = partial(beat, "writing weights for the server")
    on_first_rank(process, partial(export, config, saved, out, dtype=dtype), doing)
    return out


def weights_sums(session: Session) -> list[float]:
    """Return sums of the trained weights and of their squares over all ranks, which identify them.

    Bit-for-bit equal weights on one layout have equal sums; a resume on another layout rounds them
    differently, and then samples the same answers anew.
    """
    state, sums = session.state, torch.zeros(2, dtype=torch.float64)
    state.sync_master_weights()
    with torch.no_grad():
        for index in range(len(state.tensors)):
            with state.swapped_in(index):
                for part in state.tensor(index, MASTER).flatten().split(_AT_ONCE):
                    exact = part.double()
                    sums += torch.stack([exact.sum(), exact.square().sum()]).cpu()
    return session.process.sum(*sums.tolist())


def on_first_rank(process: Process, work: Callable[[], Result], beat: Callable[[], None]) -> Result:
    """Return the result of the first rank's work, or raise its error, on all ranks together.

    The work is done in a thread, so that no rank is silent meanwhile; an error of `beat`, raised on
    all ranks, does not wait for its end.
    """
    result, problem = None, None
    pool = ThreadPoolExecutor(1)
    try:
        futures = [pool.submit(work)] if process.is_first else []
        while process.any(bool(wait(futures, POLL_SECONDS).not_done)):
            beat()
        try:
            result = futures[0].result() if futures else None
        except TrainctlError as error:
            problem = error
        except OSError as error:
            problem = MachineError(describe_exception(error))
    finally:
        pool.shutdown(wait=False)
    result, problem = process.broadcast_from_first((result, problem))
    if problem is not None:
        raise problem.of_all_ranks()
    return result
