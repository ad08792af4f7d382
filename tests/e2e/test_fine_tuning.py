"""Tests of fine-tuning from a checkpoint; transformers samples the answers to check."""

import json

import pytest
from commands import events, trainctl
from small_chat_model import questions, share_right, write_base, write_chat

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded")]


WAYS = {
    "full": ["training.steps=100", "optimizer.lr=3e-3"],
    "lora": ["training.steps=150", "optimizer.lr=1e-2", "adapter=lora", "adapter.rank=8"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Checkpoint of a model that was never trained on conversations."""
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_fine_tuning_learns_to_answer_what_is_held_out(base, tmp_path, how):
    learnt, held_out = questions()
    assert share_right(base, held_out) == 0
    file = write_chat(tmp_path / "chat.jsonl", learnt)
    said = trainctl(
        "launch", "recipe=sft-tiny", f"model.path={base}", f"data.paths=[{file}]",
        "training.sample_tokens=4", "training.sample_prompts=[twice 7 for ann, next 2 for tom]",
        *how, "--run-dir", "run",
        cwd=tmp_path, TRAINCTL_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    (start,) = events(tmp_path / "run", "start")
    count = start["conversations"]["data"]["conversations"]
    assert 150 < count < len(learnt) and f"{count} conversations" in said
    answers = [(each["prompt"], each["text"]) for each in events(tmp_path / "run", "sample")]
    assert answers == [("twice 7 for ann", "14"), ("next 2 for tom", "3")]
    if "adapter=lora" in how:
        asks_lm_eval(tmp_path, held_out)
        said = trainctl("sample", "run", "twice 7 for ann", "--temperature", "0", cwd=tmp_path)
        assert said.splitlines()[-1] == "14", "the answer alone, up to the end of its turn"
    merge = ["--merge"] if "adapter=lora" in how else []
    said = trainctl("export", "run", "out", *merge, "--check", cwd=tmp_path)
    assert "  7 texts and conversations compared" in said and "\nequal" in said
    assert share_right(tmp_path / "out", held_out) >= 0.95
    shown = trainctl("data", "show", "run", "--samples", "0", cwd=tmp_path)
    assert "<s><|im_start|>user\n" in shown and "<|im_end|>]]" in shown


def asks_lm_eval(folder, pairs):
    """Evaluate the newest checkpoint by lm-eval on a task of the user's own, without downloads."""
    (folder / "tasks").mkdir()
    rows = ({"question": question, "answer": answer} for question, answer in pairs)
    file = folder / "tasks" / "reckon.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks" / "reckon.yaml").write_text(
        f"""task: reckon
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
    )
    asks = ["--tasks", "reckon", "--include-path", "tasks", "--chat", "--batch-size", "20"]
    shown = trainctl("evaluate", "run", *asks, cwd=folder, HF_HUB_OFFLINE="1",
                     HF_HOME=str(folder / "hub"))  # fmt: skip
    (record,) = events(folder / "run", "tasks")
    (row,) = record["results"]
    assert row["value"] >= 0.95 and row["samples"] == len(pairs) and row["shots"] == 0
    assert row["task"] == "reckon" and row["metric"] == "exact_match" and row["stderr"] < 0.03
    assert f"reckon  exact_match  {row['value']:.4f}" in shown and record["step"] == 150
