"""From a checkpoint to a model that answers: its answers are checked, sampled by transformers."""

import pytest
from commands import events, trainctl
from small_chat_model import questions, share_right, write_base, write_chat

pytestmark = pytest.mark.slow


WAYS = {
    "full": ["training.steps=100", "optimizer.lr=3e-3"],
    "lora": ["training.steps=150", "optimizer.lr=1e-2", "adapter=lora", "adapter.rank=8"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint that has never seen a conversation."""
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
    merge = ["--merge"] if "adapter=lora" in how else []
    trainctl("export", "run", "out", *merge, cwd=tmp_path)
    assert share_right(tmp_path / "out", held_out) >= 0.95
    shown = trainctl("data", "show", "run", "--samples", "0", cwd=tmp_path)
    assert "<s><|im_start|>user\n" in shown and "<|im_end|>]]" in shown
