"""A run whose data are messages is sampled, scored and exported as chat unless told otherwise."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_files import asked, write_tokenizer
from rank_processes import tiny_config, tiny_plan

from trainctl.config.registry import new_section
from trainctl.config.schema import OnTooLong, Packing, RunConfig
from trainctl.data.corpora import load_recorded_corpora
from trainctl.data.prepare import prepare
from trainctl.data.tokenizer import load_tokenizer
from trainctl.runs.layout import RunPaths
from trainctl.train import offline, tasks
from trainctl.train.evaluation import prompts_of

QUESTION, ANSWER = asked(("say 3", "3 it is"))
TEXTS = {"prompt": "say 3", "completion": "3 it is", "chosen": "3 it is", "rejected": "4"}
MESSAGES = {
    "prompt": [QUESTION],
    "completion": [ANSWER],
    "chosen": [ANSWER],
    "rejected": [{**ANSWER, "content": "4"}],
    "messages": [QUESTION, ANSWER],
}
CASES = [
    ("preferences", MESSAGES, {}, True),
    ("preferences", TEXTS, {}, False),
    ("answers", MESSAGES, {}, True),
    ("prompts", MESSAGES, {}, True),
    ("prompts", TEXTS, {}, False),
    ("prompts", TEXTS, {"as_message": True}, True),
    ("chat", MESSAGES, {}, True),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


def config_on(folder: Path, kind: str, record: dict, **keys: object) -> RunConfig:
    """Return the configuration of a run on forty records like one."""
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps({**record, "label": n % 2 == 0}) + "\n" for n in range(40)))
    config = tiny_config()
    config.data = new_section("data", kind, paths=[str(file)], held_out_fraction=0.0, **keys)
    tokenizer = write_tokenizer(folder / "tokenizer")
    config.tokenizer = new_section("tokenizer", "hf", path=str(tokenizer))
    config.model.vocab_size, config.training.sequence_length = 320, 64
    config.training.steps, config.zero_stage.stage = 2, 0
    return config


@pytest.mark.parametrize(("kind", "record", "keys", "is_chat"), CASES)
def test_data_of_messages_are_sampled_as_messages(tmp_path, kind, record, keys, is_chat):
    config = config_on(tmp_path, kind, record, **keys)
    tokenizer = load_tokenizer(config.tokenizer)
    prompts = prompts_of(config.data, tokenizer)
    as_chat = prompts_of(config.data, tokenizer, chat=True)
    assert (prompts.ids("say 3") == as_chat.ids("say 3")) is is_chat
    assert prompts.ends == as_chat.ends
    assert prompts_of(config.data, tokenizer, chat=False).template is None


@pytest.mark.parametrize("is_chat", [True, False])
def test_scores_are_of_messages_and_the_record_of_a_run_is_enough(tmp_path, monkeypatch, is_chat):
    config = config_on(tmp_path, "preferences", MESSAGES if is_chat else TEXTS)
    config.data.packing, config.data.mask_documents = Packing.best_fit, True
    config.data.on_too_long = OnTooLong.drop
    config.objective = new_section("objective", "simpo")
    plan = tiny_plan(config, 1)
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    prepare(plan, run)
    (tmp_path / "records.jsonl").unlink()
    assert [each.has_messages for each in load_recorded_corpora(run.corpus).values()] == [is_chat]
    plan.config.model.score_outputs = 1
    model = SimpleNamespace(inference=nullcontext, device=SimpleNamespace(type="cpu"))
    given = SimpleNamespace(plan=plan, run=run, load=lambda: model, progress=None)
    seen: list[bool] = []
    monkeypatch.setattr(tasks, "scores_of", lambda *_, chat, **__: seen.append(chat) or [])
    for asked_for in (None, True, False):
        offline._score(given, "say 3", ["3 it is"], chat=asked_for)
    assert seen == [is_chat, True, False]
