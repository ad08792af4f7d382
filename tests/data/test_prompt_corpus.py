"""Prompts: what a record must have, and what a rollout and its rewards get of it."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_files import MARKED, write_tokenizer
from rank_processes import tiny_config, tiny_plan

from trainctl.config.registry import new_section, part_class
from trainctl.data import tasks
from trainctl.data.cache_files import cache_folder
from trainctl.data.corpora import load_corpora
from trainctl.data.corpus import build_corpus
from trainctl.data.packing import load_bins
from trainctl.data.prepare import prepare
from trainctl.data.record_encoders import PromptEncoder
from trainctl.data.sample_contents import read_samples
from trainctl.data.text_search import find_text
from trainctl.data.tokenizer import ByteTokenizer, FileTokenizer
from trainctl.errors import TrainctlError
from trainctl.options.reward import RewardSection
from trainctl.readers.conversations import BadRecord, as_text, prompt_of
from trainctl.runs.layout import RunPaths
from trainctl.train.data import TrainingData, held_out_data

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (["a"], "it has no object, and no 'prompt'"),
        ({"question": "a"}, "it has 'question', and no 'prompt'"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [USER, ANSWER]}, "no multi-turn rollouts"),
        (
            {"prompt": [USER, {"role": "assistant", "content": ""}, USER]},
            "an answer before the end is to be generated",
        ),
        ({"prompt": [[USER], [USER]]}, "no multi-turn rollouts"),
        ({"prompt": [USER, USER]}, "roles out of order"),
        ({"prompt": [USER], "tools": 3}, "`tools` is no list"),
    ],
)
def test_what_is_no_prompt_is_refused_with_the_reason(record: Any, why: str) -> None:
    with pytest.raises(BadRecord, match=why):
        prompt_of(record)


def test_all_other_columns_are_kept() -> None:
    assert prompt_of({"prompt": "a", "answer": 4, "at": None}) == {
        "prompt": "a",
        "columns": {"answer": 4, "at": None},
    }
    assert prompt_of({"q": "a", "prompt": "b"}, "q")["columns"] == {"prompt": "b"}
    whole = [{"role": "system", "content": "brief"}, USER, ANSWER, USER]
    assert prompt_of({"prompt": whole, "tools": '[{"name": "f"}]', "n": 1}) == {
        "prompt": whole,
        "tools": [{"name": "f"}],
        "columns": {"n": 1},
    }


def test_messages_are_rendered_with_the_generation_prompt(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path / "t", MARKED) / "tokenizer.json")
    encoder = PromptEncoder(new_section("data", "prompts", paths=["x"]), tokenizer)
    text = as_text(prompt_of({"prompt": [USER], "answer": "4"}))
    (ids,) = encoder.encode_all([text])
    seen = "<s><|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids.tolist(), with_special=True) == seen
    assert json.loads(encoder.record(text, ids)) == [seen, {"messages": [USER], "answer": "4"}]
    plain = as_text(prompt_of({"prompt": "<s> 2+2?", "answer": "4"}))
    (ids,) = encoder.encode_all([plain])
    assert json.loads(encoder.record(plain, ids)) == ["<s> 2+2?", {"answer": "4"}]
    section = new_section("data", "prompts", paths=["x"])
    with pytest.raises(TrainctlError, match="chat template"):
        PromptEncoder(section, ByteTokenizer()).encode_all([text])


def rewarded(file: Path, **changes: Any) -> Any:
    reward = part_class(RewardSection, "exact_answer")(kind="exact_answer")
    return tiny_config(
        **{
            "steps": 4,
            "sequence_length": 64,
            "evaluate_every_steps": 0,
            "sample_tokens": 0,
            "objective__kind": "grpo",
            "objective__max_prompt_tokens": 16,
            "objective__max_answer_tokens": 16,
            "objective__rewards": {"exact_answer": reward},
            "data__kind": "prompts",
            "data__paths": [str(file)],
            "data__held_out_fraction": 0.2,
            "data__mask_documents": True,
            "data__on_too_long": "drop",
            "data__packing": "best_fit",
            "data__max_bytes": None,
            **changes,
        }
    )


def test_a_prompt_is_found_with_its_columns_by_its_place_in_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "TASK_BYTES", 300)
    rows = [
        {"prompt": f"{n}+{n}=", "answer": str(2 * n), "notes": ["é\n\u2028", {"long": "x" * n}]}
        for n in range(60)
    ]
    long = {"prompt": "1+" * 12, "answer": "12"}
    file = written(tmp_path / "sums.jsonl", [long, *rows, long])
    plan = tiny_plan(rewarded(file), 1)
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    prepare(plan, run)
    assert len([*cache_folder().rglob("records.jsonl")]) > 3
    corpora = load_corpora(run.corpus, plan.config.data)
    data = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    (held_out,) = held_out_data(plan, corpora).values()
    (dataset,) = data.datasets.values()
    assert dataset.num_samples + held_out.num_samples == len(rows)
    prompts = [data.prompt(number) for number in range(dataset.num_samples)]
    assert [each.text for each in prompts] != sorted(each.text for each in prompts)
    shown = read_samples(plan, corpora, ByteTokenizer(), [*range(20)], most_characters=0)
    each_prompt = [prompts[counter // plan.config.objective.samples].text for counter in range(20)]
    assert [each.text for each in shown] == each_prompt  # a counter is that of an answer
    each = plan.config.objective.samples
    events = [{"event": "step", "step": n, "samples": [n * each, (n + 1) * each]} for n in range(9)]
    (match,) = find_text(plan, corpora, ByteTokenizer(), prompts[3].text, events)
    assert [(at.step, at.sample) for at in match.seen] == [(3, 3 * each)]
    prompts += [held_out.prompt(index) for index in range(held_out.num_samples)]
    assert all(bytes(each.ids).decode() == each.text for each in prompts)
    found = {each.text: each.columns for each in prompts}
    assert found == {row.pop("prompt"): row for row in rows}
    again = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    assert again.prompt(3) == prompts[3]
    assert again.prompt(dataset.num_samples).text in found  # the second epoch


def test_a_prompt_that_is_too_long_is_an_error_if_asked(tmp_path: Path) -> None:
    file = written(tmp_path / "p.jsonl", [{"prompt": "a" * 17}, *[{"prompt": "a"}] * 3])
    config = rewarded(file, data__on_too_long="error", data__held_out_fraction=0.0)
    corpus = build_corpus(config.data, ByteTokenizer(), workers=1)
    with pytest.raises(TrainctlError) as told:
        load_bins(config, corpus, corpus.train)
    limit = "objective.max_prompt_tokens is 16"
    assert told.value.message == f"a record has 17 tokens, and {limit}"


def test_records_are_part_of_the_digest_and_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    section = new_section("data", "prompts", held_out_fraction=0.0)
    corpora = []
    for answer in ("4", "5"):
        section.paths = [
            str(written(tmp_path / f"{answer}.jsonl", [{"prompt": "2+2=", "a": answer}]))
        ]
        corpora.append(build_corpus(section, ByteTokenizer(), workers=1))
    assert corpora[0].digest != corpora[1].digest
    file = Path(corpora[1].folder) / "train.records"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"5", b"4"))
    assert build_corpus(section, ByteTokenizer(), workers=1).digest == corpora[1].digest
    assert file.read_bytes() == whole


def test_parquet_columns_of_any_type_are_kept(tmp_path: Path) -> None:
    table = pa.table({"question": ["1?"], "at": [date(2026, 1, 2)], "n": [None]})
    pq.write_table(table, tmp_path / "p.parquet")
    section = new_section("data", "prompts", held_out_fraction=0.0, prompt_key="question")
    section.paths = [str(tmp_path / "p.parquet")]
    corpus = build_corpus(section, ByteTokenizer(), workers=1)
    (line,) = corpus.records(corpus.train).tobytes().splitlines()
    assert json.loads(line) == ["1?", {"at": "2026-01-02", "n": None}]
