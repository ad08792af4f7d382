"""A directory with more tokens: against transformers, and as a start like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_files import write_tokenizer
from commands import trainctl
from rank_processes import Case, tiny_plan, train_cases
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainctl.config.compose import compose
from trainctl.errors import TrainctlError
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.train.export.directory import export
from trainctl.train.models.new_tokens import add_tokens

NEW = ["<|call|>", "<|end|>"]
TEXT = "a <|call|>b<|end|>"


def write_base(folder: Path, *, tied: bool = False, spare_rows: int = 0) -> int:
    """Write a small model with a tokenizer, in several files; return the number of token ids."""
    write_tokenizer(folder)
    ids = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=ids + spare_rows,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB")
    return ids


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_and_encodes_it(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainctl.train.models.new_tokens.ROWS", 100)
    base, out = tmp_path / "base", tmp_path / "out"
    ids = write_base(base, tied=tied)
    found = add_tokens(base, out, [*NEW, "<|im_end|>"], multiple_of=64)
    assert found.ids == {NEW[0]: ids, NEW[1]: ids + 1} and found.known == ["<|im_end|>"]
    rows = -(-(ids + 2) // 64) * 64
    assert (found.rows_before, found.rows) == (ids, rows)

    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (base, out))
    assert after(TEXT)["input_ids"][-3:] == [ids, *before("b")["input_ids"], ids + 1]
    assert after("plain text")["input_ids"] == before("plain text")["input_ids"]
    assert after.chat_template == before.chat_template
    assert after.decode([ids], skip_special_tokens=True) == ""

    old, new = (AutoModelForCausalLM.from_pretrained(folder) for folder in (base, out))
    assert new.config.vocab_size == rows and new.dtype == torch.bfloat16
    mean = old.get_input_embeddings().weight.double().mean(0).bfloat16()
    for ours, theirs in zip(
        (new.get_input_embeddings(), new.get_output_embeddings()),
        (old.get_input_embeddings(), old.get_output_embeddings()),
        strict=True,
    ):
        assert torch.equal(ours.weight[:ids], theirs.weight)
        mean = theirs.weight.double().mean(0).bfloat16()
        assert torch.equal(ours.weight[ids:], mean.expand(rows - ids, -1))
    batch = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(new(batch).logits[..., :ids], old(batch).logits)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    kept = {file.name for file in out.glob("*.safetensors")}
    assert kept == set(index["weight_map"].values())
    same = [name for name in kept if (out / name).read_bytes() == (base / name).read_bytes()]
    assert len(same) >= len(kept) - 2


def test_rows_that_no_token_had_are_taken_first(tmp_path: Path) -> None:
    ids = write_base(tmp_path / "base", spare_rows=3)
    found = add_tokens(tmp_path / "base", tmp_path / "out", NEW, multiple_of=64)
    assert found.rows == found.rows_before == ids + 3
    old, new = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).get_input_embeddings().weight
        for name in ("base", "out")
    )
    mean = old[:ids].double().mean(0).bfloat16()
    assert torch.equal(new[ids : ids + 2], mean.expand(2, -1))
    assert torch.equal(new[ids + 2], old[ids + 2]) and torch.equal(new[:ids], old[:ids])


def test_tokens_that_are_there_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    with pytest.raises(TrainctlError, match="all of these tokens already"):
        add_tokens(tmp_path / "base", tmp_path / "out", ["<|im_end|>"])
    (tmp_path / "base" / "tokenizer.json").unlink()
    with pytest.raises(TrainctlError, match=r"no tokenizer\.json"):
        add_tokens(tmp_path / "base", tmp_path / "out", NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_what_is_not_the_model_of_its_configuration_is_refused(tmp_path: Path) -> None:
    """Else rows that the configuration does not count would be lost."""
    base = tmp_path / "base"
    ids = write_base(base)
    whole = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**whole, "vocab_size": ids - 60}))
    with pytest.raises(TrainctlError, match=rf"embed_tokens.*{ids}"):
        add_tokens(base, tmp_path / "out", NEW)
    (base / "config.json").write_text(json.dumps(whole))
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["model"]["type"] = "none"
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TrainctlError, match=r"tokenizer\.json is not a tokenizer"):
        add_tokens(base, tmp_path / "out", NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_an_index_without_metadata_and_further_templates_are_kept(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    write_base(base)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    (base / "model.safetensors.index.json").write_text(json.dumps({**index, "metadata": None}))
    add_tokens(base, out, NEW)
    made = json.loads((out / "model.safetensors.index.json").read_text())
    assert made["weight_map"] == index["weight_map"] and made["metadata"]["total_size"] > 0
    assert AutoTokenizer.from_pretrained(out).chat_template["rag"] == "{{ messages }}"


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_a_run_starts_from_it(tmp_path: Path) -> None:
    """Two tensor ranks shard the vocabulary; the export has the new tokens."""
    ids = write_base(tmp_path / "base")
    said = trainctl("add-tokens", "base", "out", *NEW, "<|im_end|>", cwd=tmp_path)
    assert f"<|call|> ({ids}), <|end|> ({ids + 1})" in said and "<|im_end|> was there" in said
    file = tmp_path / "a.txt"
    file.write_text("".join(f"{n} <|call|>{n}<|end|>\n" for n in range(2000)))
    config = compose(
        [
            "recipe=tiny", "model=hf", f"model.path={tmp_path / 'out'}", "tokenizer=hf",
            "data=files", f"data.paths=[{file}]", "hardware=2xcpu", "parallelism.tensor=2",
            "training.steps=2", "training.sequence_length=64", "training.global_batch_size=4",
            "checkpoint.at_end=true",
            "training.evaluation_samples=0", "training.sample_tokens=0",
        ]
    ).config  # fmt: skip
    assert config.model.vocab_size == ids + 2
    run, plan = RunPaths(tmp_path / "run"), tiny_plan(config, 2)
    train_cases(2, [Case(plan, run)])
    checkpoint = checkpoints.list_checkpoints(run)[-1].path
    export(plan.config, checkpoint, tmp_path / "exported", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer(NEW[1])["input_ids"][-1:] == [ids + 1]
    trained, start = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("exported", "out")
    )
    new = start.get_input_embeddings().weight - trained.get_input_embeddings().weight
    assert (new.abs().amax(dim=1)[ids:] > 0).all()
