"""Inspection of a model in a child process, so that commands that plan import no torch.

Many published models need no process: their anatomy and trace are shipped.
`published_models.json` is written by `scripts/published_models.py` from transformers' own classes.
A directory matches a shipped model if its `config.json` agrees in everything that the tensors
depend on: a fine-tune of Qwen2.5 7B matches Qwen2.5 7B.

Configurations are plain data here, as `config.codec.to_plain` makes them and as the child reads
them. The child answers two questions by the model's own code: its anatomy
(`trainctl.train.models.anatomy`), and what autograd saves in its blocks
(`trainctl.train.models.trace`). Results are cached in the user's cache folder under a digest of
everything they depend on. The anatomy depends on the directory's `config.json` and code and on the
version of transformers; the trace also on the sequence length, the number formats and the versions
of the other packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainctl.child_processes import ChildProcess, NoReply, parse_object
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.models.local_path import local_path

SECONDS = 600
"""Timeout of the child, far above the time of any trace: a directory's own code may do anything."""

PROGRESS_SECONDS = 5
"""Interval between progress lines."""

NOT_TRACED = "TC147"

FORMAT = 7
"""Version of the cache's files and of what an anatomy has; other versions are ignored."""

PACKAGES = ("torch", "transformers", "trainctl")


class Question(Enum):
    """A question that the child answers by the model's own code."""

    anatomy = "anatomy"
    factory = "factory"
    trace = "trace"


Config = Mapping[str, Any]
"""A whole configuration as plain data."""

_known: dict[str, Any] = {}


def anatomy_in_child(config: Config, folder: Path | None = None) -> list[str]:
    """Return the anatomy of a model that its own code builds, in the form of `model.anatomy`.

    Args:
        folder: Where the user's own code is looked up; None is the current directory.

    Raises:
        TrainctlError: The model cannot be built; says why, and names the file.
    """
    folder = folder or Path.cwd()
    found: list[str]
    if config["model"]["factory"] is not None:
        found = factory_in_child(config, folder)["anatomy"]
    else:
        found = _answer_question(Question.anatomy, config, folder)
    return found


def factory_in_child(config: Config, folder: Path | None = None) -> dict[str, Any]:
    """Return what `model.factory` makes: `anatomy`, and with `model=module` all its `arguments`.

    It is never cached, since the function may read any file.

    Raises:
        TrainctlError: The arguments are wrong, or the model cannot be built.
    """
    found: dict[str, Any] = _ask_process(Question.factory, config, folder or Path.cwd())
    return found


def trace_in_child(
    config: Config, folder: Path | None = None, *, family: str = ""
) -> dict[str, Any]:
    """Return the trace of a model, as JSON (`trainctl.memory.traced.TracedModel`).

    Args:
        folder: Where the user's own code is looked up; None is the current directory.
        family: Representation of the model family's specification; part of the cache key.

    Raises:
        TrainctlError: The model cannot be built or traced; says why, and names the file.
    """
    found: dict[str, Any] = _answer_question(Question.trace, config, folder or Path.cwd(), family)
    return found


def known_trace(config: Config, *, family: str = "") -> dict[str, Any] | None:
    """Return a cached or shipped trace; None if there is none. Never starts a process.

    Args:
        family: As for `trace_in_child`.
    """
    found: dict[str, Any] | None = _known_answer(Question.trace, config, family)[1]
    return found


def _answer_question(question: Question, config: Config, folder: Path, family: str = "") -> Any:
    key, found = _known_answer(question, config, family)
    if found is None:
        found = _ask_process(question, config, folder)
        _known[key] = found
        _cache_answer(key, found)
    return found


def _known_answer(question: Question, config: Config, family: str) -> tuple[str, Any]:
    """Return the digest of a question, and its cached or shipped answer; None without one."""
    key = _cache_key(question, config, family)
    found = _cached_answer(key)
    if found is None and (
        name := published_name(config["model"], _package_version("transformers"))
    ):
        if question is Question.anatomy:
            found = published_table()["models"][name]["anatomy"]
        else:
            found = published_trace(name, config)
    return key, found


def _cached_answer(key: str) -> Any:
    """Return the answer cached in memory or on disk; None if there is none."""
    if key not in _known:
        try:
            content = json.loads(_cache_file(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return None
        if "found" not in content:  # written by another program
            return None
        _known[key] = content["found"]
    return _known[key]


def _ask_process(question: Question, config: Config, folder: Path) -> Any:
    what = "tracing" if question is Question.trace else "reading"
    name = config["model"]["name"]
    _print_progress(f"{what} {name} by its own code, once: torch and transformers are imported")
    asked = {"question": question.value, "config": config, "folder": str(folder)}
    try:
        answer = ask_inspection(
            asked, lambda seconds: _print_progress(f"  {what} {name}: {seconds} s")
        )
        if "errors" in answer:
            errors = [_finding_from_json(each) for each in answer["errors"]]
            raise TrainctlError.from_findings(errors)
        return answer["found"]
    except (NoReply, LookupError, TypeError, ValueError) as failed:
        why = f"its process {failed}" if isinstance(failed, NoReply) else "its reply is none"
        raise _not_traced_error(config, why) from None


def ask_inspection(
    question: Mapping[str, Any], on_wait: Callable[[int], object] = lambda seconds: None
) -> dict[str, Any]:
    """Return the answer of a process with torch (`trainctl.train.models.inspection_entry`).

    Args:
        on_wait: Called every `PROGRESS_SECONDS` with the seconds so far.

    Raises:
        NoReply: With the last line that the process printed.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = ["-P", "-m", "trainctl.train.models.inspection_entry"]
    with (
        tempfile.TemporaryFile() as output,
        ChildProcess(command, environment=environment, output=output) as process,
    ):
        try:
            process.send(json.dumps(question).encode(), SECONDS)
            for seconds in range(PROGRESS_SECONDS, SECONDS + 1, PROGRESS_SECONDS):
                if process.is_readable(PROGRESS_SECONDS):
                    break
                on_wait(seconds)
            else:
                raise NoReply(f"took more than {SECONDS} s")
            return parse_object(process.receive(PROGRESS_SECONDS))
        except NoReply as failed:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines() or ["no word"]
            raise NoReply(f"{failed}: {lines[-1][:300]}") from None


def _print_progress(line: str) -> None:
    """Print a line of progress on stderr, ignoring a closed stderr."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _not_traced_error(config: Config, why: str) -> TrainctlError:
    where = config["model"]["path"] or config["model"]["factory"]
    message = f"the model of {where} cannot be read by its code: {why}"
    return TrainctlError.from_findings([Finding(rule=NOT_TRACED, key="model", message=message)])


def _finding_from_json(told: dict[str, Any]) -> Finding:
    texts = {name: told[name] for name in ("rule", "key", "message", "hint")}
    return Finding(**texts, exit_code=ExitCode(told["exit_code"]))


def _cache_key(question: Question, config: Config, family: str) -> str:
    """Return a digest of everything that an answer depends on.

    The anatomy is part of the trace's digest, and identifies the code of `model.factory`.
    """
    model = config["model"]
    files = _file_digests(model)
    parts: list[Any]
    if question is Question.anatomy:
        parts = [
            files,
            model["family"],
            model["trust_remote_code"],
            *([model["score_outputs"]] if "score_outputs" in model else []),
            _package_version("transformers"),
        ]
    else:
        labels = ("name", "weights", "initial_weights")
        parts = [
            {key: value for key, value in model.items() if key not in labels},
            family,
            config["precision"],
            config["training"]["sequence_length"],
            config["data"]["mask_documents"],
            *([config["parallelism"]["tensor"]] if "arguments" in model else []),
            {package: _package_version(package) for package in PACKAGES},
            files,
        ]
    return hashlib.sha256(json.dumps([question.value, FORMAT, *parts]).encode()).hexdigest()


def _file_digests(model: Mapping[str, Any]) -> list[str]:
    """Return digests of the files of a directory that define the model."""
    if not model["path"]:
        return []
    folder = Path(model["path"])
    code = sorted(folder.glob("*.py")) if model["trust_remote_code"] else []
    files = [folder / "config.json", *code]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()]


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cache_file(key: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(local_path("~/.cache"))
    return Path(cache) / "trainctl" / "traces" / f"{key}.json"


def _cache_answer(key: str, found: Any) -> None:
    """Cache an answer on disk for later commands; a failed write is ignored."""
    path = _cache_file(key)
    part = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"format": FORMAT, "found": found}), encoding="utf-8")
        part.replace(path)
    except OSError:
        return


FILE = Path(__file__).with_name("published_models.json")

PRECISION = "bf16"
"""Format of the shipped traces, without autocast: the most common one in plans."""

IGNORED = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "use_cache"),
    *("initializer_range", "max_position_embeddings", "original_max_position_embeddings"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
    *("aux_loss_alpha", "router_aux_loss_coef", "seq_aux", "routed_scaling_factor"),
    *("initial_context_length", "ep_size", "num_nextn_predict_layers", "pretraining_tp"),
}
"""Keys of config.json that affect neither tensors nor what autograd saves."""

DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "resid_pdrop": 0.0,
    "router_jitter_noise": 0.0,
}
"""Values that config.json may write or omit with the same meaning."""

_ROPES_BY_LENGTH = ("dynamic", "longrope", "su")


def shape_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a `config.json` that tensors depend on, normalized for comparison."""
    shape = {
        key: value
        for key, value in raw.items()
        if key not in IGNORED and (key not in DEFAULTS or value != DEFAULTS[key])
    }
    if not shape.get("use_sliding_window", True):
        for key in ("use_sliding_window", "sliding_window", "max_window_layers"):
            shape.pop(key, None)
    layers = shape.pop("layer_types", None) or []
    if set(layers) != {"full_attention"} and layers:
        shape["layer_types"] = " ".join(layers)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _ROPES_BY_LENGTH:
        shape["rope"] = kind
    return shape


@cache
def published_table() -> dict[str, Any]:
    """Return the shipped file: version of transformers, and models by name."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def published_name(model: Mapping[str, Any], transformers: str) -> str | None:
    """Return the name of the shipped model that a directory matches; None without a match.

    Args:
        model: Section `model` of a configuration, as plain data.
        transformers: Installed version, which must be the shipped file's; empty if none is.
    """
    if not model["path"] or model["trust_remote_code"] or model["factory"]:
        return None
    if model.get("score_outputs"):  # the shipped models have a head over the vocabulary
        return None
    if transformers not in ("", published_table()["transformers"]):
        return None
    try:
        raw = json.loads((Path(model["path"]) / "config.json").read_text(encoding="utf-8"))
        shape = shape_of(raw)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return None  # composition has reported the file's problem
    return next(
        (n for n, each in published_table()["models"].items() if shape in each["shapes"]), None
    )


def published_trace(name: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the shipped trace of a model, as `trace_in_child` does; None for other formats.

    Bytes per token of a block have a constant part and a part proportional to the sequence length,
    which eager attention and heads of unequal widths save.
    """
    entry, precision = published_table()["models"][name], config["precision"]
    is_attention = config["model"]["attention"] in (entry["attention"], "flash_attention_2")
    if not is_attention or precision["compute"] != PRECISION or precision["autocast"]:
        return None
    if config["data"]["mask_documents"]:
        return None
    length = config["training"]["sequence_length"]
    block = {
        part: round(fixed + by_length * length)
        for part, (fixed, by_length) in entry["block"].items()
    }
    return {"anatomy": entry["anatomy"], "block": block}
