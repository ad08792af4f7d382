"""`data=chat`: conversations of every shape and file, packed whole, and what is learnt of them."""

import gzip
import json
import re
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from chat_files import MARKED, UNMARKED, asked, write_tokenizer
from rank_processes import tiny_config

from trainctl.config.registry import new_section
from trainctl.config.schema import OnBadText, OnTooLong, Packing
from trainctl.data.corpora import build_corpora, cached_corpora
from trainctl.data.packing import describe_packing, load_bins, packed_token_count
from trainctl.data.tokenizer import load_tokenizer
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.errors import TrainctlError
from trainctl.readers.conversations import (
    BadRecord,
    Learn,
    Shape,
    as_text,
    conversation_of,
)
from trainctl.readers.documents import Reader
from trainctl.readers.plain import read_array
from trainctl.train.data import PackedDataset
from trainctl.tuning.input_files import missing_files

LENGTH = 96
SHAPES = {
    Shape.messages: {"messages": asked(("a?", "b"), system="S")},
    Shape.prompt: {
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "a?"}],
        "completion": "b",
    },
    Shape.alpaca: {"instruction": "a?", "input": "", "output": "b", "system": "S"},
    Shape.sharegpt: {
        "conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}],
        "system": "S",
    },
}
BAD = {
    "it has 'text': of no shape": {"text": "a"},
    "the conversation is empty": {"messages": []},
    "`messages` is an object, and not of lists of one length": {
        "messages": {"role": ["user", "assistant"], "content": ["a"]}
    },
    "roles out of order: message 1 is one of the assistant, first": {
        "messages": asked(("a", "b"))[1:]
    },
    "roles out of order: message 3 is one of the assistant, after one of the assistant": {
        "messages": [*asked(("a", "b")), {"role": "assistant", "content": "c"}]
    },
    "roles out of order: message 3 is one of the system": {
        "messages": [*asked(("a", "b")), {"role": "system", "content": "c"}]
    },
    "nothing to learn": {"messages": asked(("a", "b"))[:1]},
    "a message of the assistant is empty": {"prompt": "a", "completion": ""},
    "has parts that are no text": {
        "messages": [{"role": "user", "content": [{"type": "image"}]}, *asked(("a", "b"))]
    },
    "a turn is from 'cat'": {"conversations": [{"from": "cat", "value": "a"}]},
    "a turn is from ['cat']": {"conversations": [{"from": ["cat"], "value": "a"}]},
    "are not both texts": {"instruction": "a", "input": ["b"], "output": "c"},
    "the role 'robot'": {"messages": [{"role": "robot", "content": "a"}]},
    "not an object": 3,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.value)
def test_every_shape_is_the_same_conversation(shape):
    expected = {"messages": asked(("a?", "b"), system="S")}
    assert conversation_of(SHAPES[shape]) == expected
    assert conversation_of(SHAPES[shape], shape) == expected


def test_tools_and_parts_and_history():
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            *asked(("a", "b"))[1:],
        ],
        "tools": json.dumps(tools),
    }
    assert conversation_of(record) == {"messages": asked(("a", "b")), "tools": tools}
    columns = {key: [each[key] for each in asked(("a", "b"))] for key in ("role", "content")}
    assert conversation_of({"messages": columns}) == {"messages": asked(("a", "b"))}
    alpaca = {"instruction": "c", "input": "d", "output": "e", "history": [["a", "b"]]}
    assert conversation_of(alpaca)["messages"] == asked(("a", "b"), ("c\n\nd", "e"))
    dated = {"messages": [{**asked(("a", "b"))[0], "at": date(2026, 1, 2)}]}
    assert json.loads(as_text(dated))["messages"][0]["at"] == "2026-01-02"
    with pytest.raises(BadRecord, match=r"no 'messages', which data\.shape=messages has"):
        conversation_of(alpaca, Shape.messages)


def test_a_key_of_messages_says_what_is_learned():
    messages = asked(("a", "b"), ("c", "d"), ("e", "f"))
    for key, values in (
        ("weight", (0, 1, None)),
        ("train", (False, True, None)),
        ("loss", (False, True, None)),
    ):
        marked = [dict(each) for each in messages]
        turns = [{"from": each["role"], "value": each["content"]} for each in messages]
        for every in (marked, turns):
            for place, value in zip((1, 3, 5), values, strict=True):
                every[place] |= {key: value}
            every[0] |= {key: values[0]}
        expected = {"messages": messages, "learned": [3, 5]}
        assert conversation_of({"messages": marked}, learn_key=key) == expected
        assert conversation_of({"conversations": turns}, learn_key=key) == expected
        assert conversation_of({"messages": marked}) == expected, "found by itself"
        assert conversation_of({"conversations": turns}) == expected
        assert "learned" not in conversation_of({"messages": marked}, learn_key="")
    for place, value, why in (
        (1, 0.5, "`weight` of message 2 is 0.5, not 0 or 1"),
        (1, "0", "`weight` of message 2 is '0', not 0 or 1"),
        (0, 1, "`weight` of message 1 is 1, and it is one of the user"),
        (1, 0, "nothing to learn: `weight` is 0 or false"),
    ):
        wrong = [dict(each) for each in messages[:2]]
        wrong[place]["weight"] = value
        with pytest.raises(BadRecord, match=why):
            conversation_of({"messages": wrong}, learn_key="weight")


def test_keys_of_no_shape_come_with_the_shapes_that_are_known():
    with pytest.raises(BadRecord) as told:
        conversation_of({"question": "a", "answer": "b"})
    for keys in ("(messages)", "(conversations)", "(prompt, completion)", "(instruction, output)"):
        assert keys in str(told.value)


@pytest.mark.parametrize("said", BAD)
def test_invalid_conversations_are_refused_with_the_reason(said):
    with pytest.raises(BadRecord, match=re.escape(said)):
        conversation_of(BAD[said])


def write(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def config_of(tmp_path, paths, *, template=MARKED, **keys):
    folder = write_tokenizer(tmp_path / "tokenizer", template)
    made = tiny_config(sequence_length=LENGTH, steps=2, micro_batch_size=2, global_batch_size=4)
    made.tokenizer = new_section("tokenizer", "hf", path=str(folder))
    made.data = new_section(
        "data",
        "chat",
        paths=[str(path) for path in paths],
        **{"held_out_fraction": 0.0, "packing": Packing.best_fit, "mask_documents": True, **keys},
    )
    return made


def built(config):
    tokenizer = load_tokenizer(config.tokenizer)
    (corpus,) = build_corpora(config, tokenizer).values()
    return corpus, tokenizer


def learnt(config, corpus, tokenizer):
    """Return one micro-batch of all samples, and the decoded text of labelled tokens."""
    data = PackedDataset(
        corpus,
        corpus.train,
        sequence_length=config.training.sequence_length,
        mask_documents=True,
        bins=load_bins(config, corpus, corpus.train),
    )
    batch = data.micro_batch(np.arange(data.num_samples))
    found = []
    for labels in batch.labels.tolist():
        ids = [label for label in labels if label != IGNORED_LABEL]
        found.append(tokenizer._backend.decode(ids, skip_special_tokens=False))
    return batch, "".join(found)


QUESTIONS = [{"messages": asked((f"{n}+{n}?", str(2 * n)))} for n in range(12)]
ANSWERS = sorted(f"{2 * n}" for n in range(12))


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marks", "prefixes"])
def test_answers_alone_have_labels_and_none_is_lost(tmp_path, template):
    config = config_of(tmp_path, [write(tmp_path / "chat.jsonl", QUESTIONS)], template=template)
    assert missing_files(config) == []
    corpus, tokenizer = built(config)
    assert corpus.is_marked and corpus.dtype == "<u2"
    batch, text = learnt(config, corpus, tokenizer)
    assert sorted(text.split("<|im_end|>")[:-1]) == ANSWERS
    first = batch.input_ids == tokenizer.id_of("<s>")
    assert (batch.position_ids[first] == 0).all(), "each begins by itself"
    assert first.sum() == len(QUESTIONS)
    tokens = corpus.tokens(corpus.train)[: corpus.train.tokens]
    assert int(tokens.max()) < tokenizer.vocab_size
    learns = replace(config, data=replace(config.data, learn=Learn.all.value))
    everything, whole = learnt(learns, *built(learns))
    assert whole.count("<|im_start|>user") == len(QUESTIONS)
    assert everything.input_ids.tolist() == batch.input_ids.tolist()


def test_files_of_every_kind_give_the_same(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    datasets = pytest.importorskip("datasets")
    jsonl = write(tmp_path / "chat.jsonl", QUESTIONS)
    table = pyarrow.Table.from_pylist(QUESTIONS)
    parquet.write_table(table, tmp_path / "chat.parquet")
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    digests = set()
    for path in (jsonl, tmp_path / "chat.parquet", tmp_path / "saved"):
        config = config_of(tmp_path, [path])
        assert missing_files(config) == []
        corpus, _ = built(config)
        digests.add(corpus.digest)
    assert len(digests) == 1


def test_a_change_of_template_or_rule_is_another_corpus(tmp_path):
    path = write(tmp_path / "chat.jsonl", QUESTIONS)
    config = config_of(tmp_path, [path])
    corpus, tokenizer = built(config)
    assert cached_corpora(config, tokenizer) == {"data": corpus}
    other = tmp_path / "other.jinja"
    other.write_text(MARKED.replace("<|im_start|>", "<|im_start|> "))
    for keys in (
        {"learn": Learn.last.value},
        {"chat_template": str(other)},
        {"shape": Shape.messages},
        {"learn_key": "weight"},
    ):
        changed = replace(config, data=replace(config.data, **keys))
        assert cached_corpora(changed, tokenizer) == {"data": None}
    longer = replace(config, data=replace(config.data, on_too_long=OnTooLong.drop))
    assert cached_corpora(longer, tokenizer) == {"data": corpus}, "bins alone are others"


def test_what_is_too_long_is_cut_dropped_or_an_error(tmp_path):
    long_answer, long_question = asked(("a", "b" * 200)), asked(("a" * 200, "b"))
    records = [*QUESTIONS, {"messages": long_answer}, {"messages": long_question}]
    config = config_of(tmp_path, [write(tmp_path / "chat.jsonl", records)])
    corpus, tokenizer = built(config)
    _, text = learnt(config, corpus, tokenizer)
    assert 0 < text.count("b") < 200 and "bb" in text
    assert "a" not in text.replace("<|im_end|>", "")
    bins = load_bins(config, corpus, corpus.train)
    told = describe_packing(bins.counts, corpus.held_out.documents)
    assert told == (
        "14 conversations to train on, 0 held out; 1 cut at the length of a sample; 1 left out, as "
        "nothing to learn is left where they are cut"
    )
    said = []
    packed_token_count(config, corpus, said.append)
    assert said[0] == told
    drops = replace(config, data=replace(config.data, on_too_long=OnTooLong.drop))
    _, text = learnt(drops, corpus, tokenizer)
    assert sorted(text.split("<|im_end|>")[:-1]) == ANSWERS
    assert load_bins(drops, corpus, corpus.train).counts["dropped_too_long"] == 2
    shorter = replace(drops, training=replace(drops.training, sequence_length=8))
    batch, text = learnt(shorter, corpus, tokenizer)
    assert len(batch.input_ids) == 0 and not text, "all are left out, and there is no sample"
    told = r"no conversations are left to train on at training\.sequence_length=8: 14 left out, as"
    with pytest.raises(TrainctlError, match=told) as caught:
        packed_token_count(shorter, corpus)
    assert re.match(r"a larger training\.sequence_length: .* 2\d\d tokens; or", caught.value.hint)
    refuses = replace(config, data=replace(config.data, on_too_long=OnTooLong.error))
    with pytest.raises(TrainctlError, match=r"a conversation has \d+ tokens, and training"):
        load_bins(refuses, corpus, corpus.train)


def test_what_is_bad_is_an_error_or_left_out_and_counted(tmp_path):
    refused = {"messages": asked(("no", "b"))}
    records = [*QUESTIONS, *BAD.values(), refused]
    path = write(tmp_path / "chat.jsonl", records)
    template = MARKED.replace(
        "{% for message in messages %}",
        "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}"
        "{% for message in messages %}",
    )
    config = config_of(tmp_path, [path], template=template)
    (finding,) = missing_files(config)
    assert finding.rule == "TC142" and f"{path}:13: it has 'text'" in finding.message
    with pytest.raises(TrainctlError, match="it has 'text'"):
        built(config)
    skips = replace(config, data=replace(config.data, on_bad_text=OnBadText.skip))
    assert missing_files(skips) == []
    corpus, tokenizer = built(skips)
    assert corpus.bad_text["skipped"] == len(BAD)
    _, text = learnt(skips, corpus, tokenizer)
    assert sorted(text.split("<|im_end|>")[:-1]) == ANSWERS
    assert load_bins(skips, corpus, corpus.train).counts["dropped_unwritten"] == 1


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_a_json_array_has_the_records_of_its_lines(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr("trainctl.readers.plain._ARRAY_BYTES", at_once)
    rows = [*SHAPES.values(), {**SHAPES[Shape.messages], "n": [-1.5e3, True, None, 'é\\"]']}]
    lines = write(tmp_path / "lines.jsonl", rows)
    wanted = [document.text for document in Reader(chat_on(lines)).documents([lines])]
    for indent, ending in ((None, "json"), (2, "json"), (2, "jsonl"), (None, "json.gz")):
        text = "\ufeff " * (indent == 2) + json.dumps(rows, indent=indent, ensure_ascii=False)
        path = tmp_path / f"array.{ending}"
        raw = f"{text}\n".encode()
        path.write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
        found = [*Reader(chat_on(path)).documents([path])]
        assert [document.text for document in found] == wanted
        of_second = 1 + text[: text.index('"completion"')].count("\n")
        assert found[1].line <= of_second and (indent is None) == (found[-1].line == 1)
    assert missing_files(config_of(tmp_path, [path])) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1, 2", "no ] follows"),
        ('[{"a": 1}, {"b": ', "Expecting value"),
        ('[{"a": 1} {"b": 2}]', "no ] follows"),
        ("[] []", "no end of the file"),
        ("[1,]", "Expecting value"),
        ('["a', "Unterminated string"),
        ("[" * 100_000, "recursion"),
        ("[" + "9" * 9000 + "]", "4300 digits"),
    ],
)
def test_a_malformed_json_array_is_an_error_at_its_line(tmp_path, text, why):
    path = tmp_path / "a.json"
    path.write_text("\n" + text)
    with pytest.raises(TrainctlError, match=rf"a\.json:2: the JSON array is .*{why}"):
        [*read_array(path)]


def chat_on(path):
    return new_section("data", "chat", paths=[str(path)])


def test_a_tokenizer_without_a_template_is_refused_before_the_start(tmp_path):
    path = write(tmp_path / "chat.jsonl", QUESTIONS)
    (finding,) = missing_files(config_of(tmp_path, [path], template=None))
    assert finding.rule == "TC367" and "has no chat template" in finding.message
    byte_tokenizer = config_of(tmp_path, [path])
    byte_tokenizer.tokenizer = new_section("tokenizer", "byte")
    (finding,) = missing_files(byte_tokenizer)
    assert finding.rule == "TC367"


def test_a_single_conversation_is_not_divided(tmp_path):
    config = config_of(tmp_path, [write(tmp_path / "chat.jsonl", QUESTIONS[:1])])
    built(config)
    with pytest.raises(TrainctlError, match="a single conversation cannot be divided"):
        built(replace(config, data=replace(config.data, held_out_fraction=0.1)))
