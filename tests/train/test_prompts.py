"""Tests of prompts and stop tokens of a run's model, and of their export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_files import MARKED, UNMARKED, write_tokenizer
from fabricated import fabricate
from fork_server import RanksFailed
from rank_processes import Case, tiny_config, tiny_plan, train_cases
from transformers import AutoTokenizer, GenerationConfig

from trainctl.config.schema import RunConfig
from trainctl.data.tokenizer import FileTokenizer, load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.evaluation import prompts_of, sampled_ids
from trainctl.train.export.directory import export

OVER = UNMARKED.replace("<|im_end|>", "<s>")
"""A template whose turns end otherwise than documents."""


def config_of(tokenizer: Path, **data: object) -> RunConfig:
    chat = {"kind": "chat", "paths": ["chat.jsonl"], "packing": "best_fit", "max_bytes": None}
    keys = {f"data__{key}": value for key, value in {**chat, **data}.items()}
    tokens = {"tokenizer__kind": "file", "tokenizer__path": str(tokenizer / "tokenizer.json")}
    return tiny_config(**keys, **tokens, model__vocab_size=300)


def test_an_answer_ends_at_any_end_that_is_known(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, OVER)
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    number = {name: tokenizer.id_of(name) for name in ("<|im_end|>", "<s>", "<pad>")}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    prompts = prompts_of(config_of(folder).data, tokenizer)
    assert prompts.ends == {number["<|im_end|>"], number["<s>"], 2, 5}
    asked = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert prompts.ids("a", "S") == asked
    for end in prompts.ends:
        said = iter([7, 8, end, 9])

        def scores(ids: list[int], said=said) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor(next(said)), 300).float()

        drawn = sampled_ids(
            scores, asked, num_tokens=4, window=64, seed=1, vocab_size=300, temperature=0,
            ends=prompts.ends,
        )  # fmt: skip
        assert drawn == [7, 8]
    as_text = prompts_of(config_of(folder).data, tokenizer, chat=False)
    assert as_text.ends == {number["<|im_end|>"]} and as_text.template is None
    assert as_text.ids("ab") == tokenizer.encode("ab").tolist()
    bare = FileTokenizer(write_tokenizer(tmp_path / "bare", None) / "tokenizer.json")
    with pytest.raises(TrainctlError, match="has no chat template"):
        prompts_of(config_of(folder, kind="files").data, bare, chat=True)


def test_a_sampled_answer_ends_where_its_template_ends_it(tmp_path: Path) -> None:
    """Of prompts the records say whether they are messages."""
    folder = write_tokenizer(tmp_path / "tokenizer", OVER)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    end, turn = tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<s>")
    config = config_of(folder, kind="prompts")
    prompts = prompts_of(config.data, tokenizer)
    assert prompts.ends == {end, turn, 2} and prompts.template is None
    asked = prompts_of(config_of(folder, kind="prompts", as_message=True).data, tokenizer)
    assert asked.ends == {end, turn, 2} and asked.template is not None
    bare = write_tokenizer(tmp_path / "bare", None)
    (bare / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    as_text = prompts_of(config.data, FileTokenizer(bare / "tokenizer.json"))
    assert as_text.ends == {end, 2}
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    export(config, fabricate(run, config.model), tmp_path / "out", dtype=torch.float32)
    found = GenerationConfig.from_pretrained(str(tmp_path / "out")).eos_token_id
    assert {*found} == {end, turn, 2}


def test_an_export_has_the_template_that_was_named_and_its_ends(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    named = tmp_path / "named.jinja"
    named.write_text("{% if brief %}{% endif %}" + OVER)
    config = config_of(folder, chat_template=str(named), template_arguments={"brief": True})
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    out = tmp_path / "out"
    exported = export(config, fabricate(run, config.model), out, dtype=torch.float32)
    assert any("given brief=True" in note for note in exported.notes)
    theirs = AutoTokenizer.from_pretrained(str(out))
    assert theirs.chat_template == named.read_text()
    ends = GenerationConfig.from_pretrained(str(out)).eos_token_id
    assert {*ends} == prompts_of(config.data, load_tokenizer(config.tokenizer)).ends
    assert theirs.convert_tokens_to_ids("<s>") in ends


def test_an_export_needs_no_template_that_is_gone(tmp_path: Path) -> None:
    """The export of a preference run has the configured template; if its file is gone, a note says
    so.
    """
    folder = write_tokenizer(tmp_path / "tokenizer")
    named = tmp_path / "named.jinja"
    named.write_text(OVER)
    config = config_of(folder, kind="preferences", chat_template=str(named))
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    checkpoint = fabricate(run, config.model)
    export(config, checkpoint, tmp_path / "first", dtype=torch.float32)
    assert (tmp_path / "first" / "chat_template.jinja").read_text() == OVER
    named.unlink()
    exported = export(config, checkpoint, tmp_path / "second", dtype=torch.float32)
    assert any("without the chat template of the run" in note for note in exported.notes)
    assert "model.safetensors" in exported.files


def test_a_prompt_that_the_template_refuses_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    refusing = "{% if add_generation_prompt %}{{ raise_exception('none') }}{% endif %}" + MARKED
    folder = write_tokenizer(tmp_path / "tokenizer", refusing)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 40}]
    file = tmp_path / "chat.jsonl"
    file.write_text((json.dumps({"messages": said}) + "\n") * 200)
    config = config_of(folder, paths=[str(file)])
    config.training.steps, config.training.sample_tokens = 2, 4
    config.training.sample_prompts = ["a"]
    run = RunPaths(tmp_path / "run")
    with pytest.raises(RanksFailed, match="the chat template cannot write"):
        train_cases(1, [Case(tiny_plan(config, 1), run)])
    assert not read_events(run.events, "step")
