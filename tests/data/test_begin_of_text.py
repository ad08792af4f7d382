"""Documents and text prompts begin as the tokenizer's post-processor begins a text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from chat_files import asked, write_tokenizer
from tokenizers import Tokenizer, processors

from trainctl.cli.main import run
from trainctl.config.registry import new_section
from trainctl.config.schema import BeginDocuments
from trainctl.config.store import load_config
from trainctl.data.corpus import build_corpus
from trainctl.data.infilling import Infilling
from trainctl.data.record_encoders import (
    AnswerEncoder,
    PreferenceEncoder,
    PromptEncoder,
    StepsEncoder,
)
from trainctl.data.token_arrays import without_marks
from trainctl.data.tokenizer import FileTokenizer, encoder_of, load_tokenizer
from trainctl.errors import TrainctlError
from trainctl.models.tokenizer_files import read_facts
from trainctl.runs.directory import read_plan
from trainctl.train.evaluation import prompts_of

FORMER = Path(__file__).parents[1] / "runs" / "former_run" / "run"
MODES = [*BeginDocuments]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True)


@pytest.fixture(scope="module")
def tokenizer(folder) -> FileTokenizer:
    return FileTokenizer(folder / "tokenizer.json")


def begin(mode: BeginDocuments, tokenizer: FileTokenizer) -> list[int]:
    return [tokenizer.id_of("<s>")] if mode is BeginDocuments.tokenizer else []


def test_each_document_begins_as_the_tokenizer_says(tmp_path, tokenizer):
    texts = [f"text {number}" for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    keys = {"paths": [str(tmp_path / "a.jsonl")], "held_out_fraction": 0.2}
    folders, end = set(), [tokenizer.end_of_document]
    for mode in MODES:
        for changes in ({}, {"separator": "\n"}, {"max_bytes": 1 << 20}):
            section = new_section("data", "files", begin_documents=mode, **keys, **changes)
            corpus = build_corpus(section, tokenizer, workers=1)
            folders.add(corpus.folder)
            for split in (corpus.train, corpus.held_out):
                ids, ends = corpus.tokens(split)[:].tolist(), corpus.ends(split).tolist()
                for start, stop in zip([0, *ends[:-1]], ends, strict=True):
                    document = ids[start:stop]
                    text = tokenizer.decode(document)
                    assert text.rstrip("\n") in texts
                    plain = tokenizer.encode(text).tolist()
                    assert document == [*begin(mode, tokenizer), *plain, *end]
    assert len(folders) == 2 * 3, "`none` and `cls` are the same ids here"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_text_prompt_begins_as_the_tokenizer_says(tokenizer, mode):
    text = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "completion": "2", "label": True}
    text |= {"completions": ["2", "is it"], "labels": [True, True], "columns": {}}
    prompt = [*begin(mode, tokenizer), *tokenizer.encode("1+1=").tolist()]
    if mode is BeginDocuments.tokenizer:
        assert prompt == tokenizer.encode_sequence("1+1=").tolist(), "as transformers does"
    encoders = {
        "preferences": PreferenceEncoder,
        "answers": AnswerEncoder,
        "prompts": PromptEncoder,
        "steps": StepsEncoder,
    }
    marks = set()
    for kind, encoder_type in encoders.items():
        encoder = encoder_type(new_section("data", kind, begin_documents=mode), tokenizer)
        marks.add(encoder.fingerprint.endswith(f" begin {tokenizer.begin_of_text}"))
        (marked,) = encoder.encode_all([json.dumps(text)])
        ids = without_marks(marked.astype("<u2")).tolist()
        assert ids[: len(prompt)] == prompt, kind
        if kind == "preferences":
            at = ids.index(tokenizer.end_of_document) + 1
            assert ids[at : at + len(prompt)] == prompt
        if kind in ("answers", "prompts"):
            answer = {"completion": [{"role": "assistant", "content": "2"}]}
            messages = {**text, "prompt": asked(("1+1=", ""))[:1], **answer}
            (marked,) = encoder.encode_all([json.dumps(messages)])
            ids = without_marks(marked.astype("<u2")).tolist()
            assert ids.count(tokenizer.id_of("<s>")) == 1, "the template's own"
    assert marks == {mode is BeginDocuments.tokenizer}
    data = new_section("data", "files", begin_documents=mode)
    prompts = prompts_of(data, tokenizer)
    assert prompts.ids("1+1=") == prompt
    assert prompts.ids("<s>1+1=") == [tokenizer.id_of("<s>"), *tokenizer.encode("1+1=").tolist()]


def test_the_facts_are_what_the_library_does(folder, tmp_path):
    one, other = ("<s>", 256), ("<|im_start|>", 257)
    template, before = processors.TemplateProcessing, processors.ByteLevel(trim_offsets=False)
    cases = [
        None,
        before,
        template(single="<s> $A", special_tokens=[one]),
        template(single="<|im_start|> <s> $A <s>", special_tokens=[one, other]),
        template(single="$A <s>", special_tokens=[one]),
        processors.BertProcessing(other, one),
        processors.RobertaProcessing(other, one),
        processors.Sequence([before, template(single="<s> $A", special_tokens=[one])]),
    ]
    found = []
    for processor in cases:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if processor is None:
            text = json.loads((folder / "tokenizer.json").read_text())
            backend = Tokenizer.from_str(json.dumps({**text, "post_processor": None}))
        else:
            backend.post_processor = processor
        backend.save(str(tmp_path / "tokenizer.json"))
        whole, plain = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
        facts = read_facts(tmp_path / "tokenizer.json")
        assert list(facts.begin_of_text) == whole[: whole.index(plain[0])]
        assert [backend.token_to_id(each) for each in facts.begin_tokens] == list(
            facts.begin_of_text
        )
        found.append(len(facts.begin_of_text))
    assert found == [0, 0, 1, 2, 0, 1, 1, 1]
    text = json.loads((tmp_path / "tokenizer.json").read_text())
    text["post_processor"] = {"type": "BertProcessing", "cls": 3}
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(TrainctlError, match="post_processor"):
        read_facts(tmp_path / "tokenizer.json")


def test_fill_in_the_middle_keeps_what_begins_a_document_first():
    settings = {"key": np.uint64(3), "rate": 1.0, "spm_rate": 0.5, "end_of_document": 9}
    infilling = Infilling(**settings, prefix=101, middle=102, suffix=103, begin_of_document=(7,))
    tokens, ends = np.array([7, *range(10, 30), 9, 7, *range(30, 50), 9]), np.array([22, 44])
    row = tokens.copy()
    infilling.apply(row, 0, tokens, ends, 0)
    assert row[0] == row[22] == 7 and row[21] == row[43] == 9
    assert {101, 102, 103} <= {*row[1:21]} and 7 not in row[1:22]


def test_a_run_of_before_begins_its_texts_as_it_did(tmp_path):
    plain = yaml.safe_load((FORMER / "config.yaml").read_text())
    plain["data"]["sources"] = {"a": {"kind": "files", "paths": ["x"]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    data = load_config(tmp_path / "config.yaml").data
    plan = read_plan(FORMER / "attempts" / "1" / "plan.json").config
    for section in (data, data.sources["a"], plan.data):
        assert section.begin_documents is BeginDocuments.cls
    tokenizer = load_tokenizer(plan.tokenizer)
    assert encoder_of(plan.data, tokenizer) is tokenizer


def test_the_plan_says_what_documents_begin_with(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words " * 999)
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 99)
    named = [f"tokenizer.path={folder}", "model.vocab_size=320"]

    def shown(*arguments: str) -> str:
        assert run(["launch", "recipe=tiny", "tokenizer=hf", *named, *arguments, "--dry-run"]) == 0
        return capsys.readouterr().out

    text = ["data=files", "data.paths=[a.txt]"]
    assert "; documents begin with <s> (data.begin_documents)" in shown(*text)
    assert "; documents do not begin with <s>" in shown(*text, "data.begin_documents=none")
