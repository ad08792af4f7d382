"""Corpora that others have tokenized: used where they are, on both sides, and what is refused."""

import json
import shutil
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenized_forms import (
    datatrove,
    dolma,
    flat,
    llm_c,
    megatron,
    numpy_file,
)

from trainctl.cli.main import run as run_command
from trainctl.config.registry import new_section
from trainctl.config.schema import HeldOutBy, RunConfig
from trainctl.data.corpus import CorpusBuilder, build_corpus
from trainctl.data.corpus_record import Corpus
from trainctl.data.token_arrays import JoinedSpans, Span
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import TrainctlError
from trainctl.options.data.tokens import IdType
from trainctl.train.data import PackedDataset
from trainctl.tuning.input_files import missing_files

END = 256
DOCUMENTS = [[*f"document {n} ".encode() * (n % 7 + 1), END] for n in range(400)]
TOKENS = sum(map(len, DOCUMENTS))
FORMS = {
    "megatron": (megatron, {}),
    "datatrove": (datatrove, {"made_with": "gpt2"}),
    "dolma": (dolma, {"id_type": "uint16"}),
    "llm.c": (llm_c, {}),
    "flat": (flat, {"id_type": "uint16"}),
    "numpy": (numpy_file, {}),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


def section(*paths, id_type=None, **fields):
    paths = [str(path) for path in paths]
    return new_section(
        "data", "tokens", paths=paths, id_type=IdType(id_type) if id_type else None, **fields
    )


def all_of(corpus, side):
    split = getattr(corpus, side)
    return corpus.tokens(split)[: split.tokens].tolist(), corpus.ends(split).tolist()


def made_in(folder, form, documents=DOCUMENTS):
    folder.mkdir(parents=True, exist_ok=True)
    return FORMS[form][0](folder, documents)


@pytest.mark.parametrize("form", FORMS)
def test_the_end_of_a_single_file_is_held_out_and_nothing_is_copied(tmp_path, form):
    file = made_in(tmp_path / "corpus", form)
    config = section(file, held_out_fraction=0.1, **FORMS[form][1])
    corpus = build_corpus(config, ByteTokenizer())
    train, ends = all_of(corpus, "train")
    held_out, held_out_ends = all_of(corpus, "held_out")
    assert train + held_out == [*chain(*DOCUMENTS)]
    lengths = np.diff([0, *ends]).tolist() + np.diff([0, *held_out_ends]).tolist()
    assert lengths == [len(each) for each in DOCUMENTS]
    assert 0.1 <= len(held_out) / TOKENS < 0.12 and corpus.end_of_document == END
    cached = Path(corpus.folder)
    assert all((cached / f"{side}.bin").stat().st_size == 0 for side in ("train", "held_out"))
    origin = corpus.origin(corpus.held_out)
    assert origin["line"].tolist() == [*range(len(ends) + 1, len(DOCUMENTS) + 1)]
    assert json.loads((cached / "files.json").read_text()) == [str(file)]
    assert 0 < corpus.unigram_entropy < np.log(257)
    # What a run has of it is what was looked at.
    builder = CorpusBuilder(config=config, tokenizer=ByteTokenizer(), run_data=config)
    assert Corpus.load(cached / "corpus.json") == corpus == builder.cached()
    assert builder.tokenize_share(1, 4) == 0


def test_the_same_tokens_give_the_same_samples_as_our_own(tmp_path):
    """A corpus that trainctl wrote can be used in place, too."""
    texts = tmp_path / "texts.jsonl"
    lines = (json.dumps({"text": bytes(each[:-1]).decode()}) for each in DOCUMENTS)
    texts.write_text("\n".join(lines))
    own = build_corpus(
        new_section("data", "files", paths=[str(texts)], held_out_fraction=0), ByteTokenizer()
    )
    corpora = [own]
    for form, (_, keys) in FORMS.items():
        file = made_in(tmp_path / form, form)
        corpora.append(build_corpus(section(file, held_out_fraction=0, **keys), ByteTokenizer()))
    shutil.copytree(own.folder, tmp_path / "own")
    mine = section(tmp_path / "own" / "train.bin", held_out_fraction=0)
    corpora.append(build_corpus(mine, ByteTokenizer()))
    first, *others = (
        PackedDataset(each, each.train, sequence_length=64, mask_documents=True).micro_batch(
            np.array([0, 7, 3])
        )
        for each in corpora
    )
    for other in others:
        assert (other.input_ids == first.input_ids).all() and (other.labels == first.labels).all()
        assert (other.position_ids == first.position_ids).all()


def test_files_are_on_a_side_each_and_read_as_one_array(tmp_path):
    for number in range(10):
        made_in(tmp_path / "corpus" / str(number), "megatron", DOCUMENTS[number::10])
    by_file = {"held_out_fraction": 0.2, "held_out_by": HeldOutBy.file}
    corpus = build_corpus(section(tmp_path / "corpus", **by_file), ByteTokenizer())
    kept = {int(Path(span.file).parent.name) for span in corpus.train.in_place}
    held_out = {int(Path(span.file).parent.name) for span in corpus.held_out.in_place}
    assert kept | held_out == set(range(10)) and len(held_out) == 2 and not kept & held_out
    tokens, ends = all_of(corpus, "train")
    documents = [each for number in sorted(kept) for each in DOCUMENTS[number::10]]
    assert tokens == [*chain(*documents)]
    assert [tokens[a:b] for a, b in pairwise([0, *ends])] == documents
    named = section(
        tmp_path / "corpus" / "[0-8]" / "*.bin",
        held_out_paths=[str(tmp_path / "corpus" / "9" / "*.bin")],
    )
    (span,) = build_corpus(named, ByteTokenizer()).held_out.in_place
    assert span.file == str(tmp_path / "corpus" / "9" / "m.bin")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_any_slice_of_joined_spans_equals_that_of_one_array(tmp_path_factory, sizes, data):
    folder = tmp_path_factory.mktemp("joined")
    whole, spans = [], []
    for number, size in enumerate(sizes):
        ids = list(range(len(whole), len(whole) + size))
        file = folder / f"{number}.bin"
        np.array([7, *ids, 7], "<u2").tofile(file)
        spans.append(Span(str(file), "<u2", 0, 1, size, file.stat().st_size, 1000))
        whole += ids
    joined = JoinedSpans(spans)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(0, len(whole) + 3))
    assert len(joined) == len(whole) and joined[start:stop].tolist() == whole[start:stop]


def test_a_single_document_is_cut(tmp_path):
    file = made_in(tmp_path / "corpus", "flat", [[5] * 900 + [END] + [6] * 100])
    config = section(file, id_type="uint32", held_out_fraction=0.1)
    np.full(1000, 5, "<u4").tofile(file)
    corpus = build_corpus(config, ByteTokenizer())
    assert (corpus.train.tokens, corpus.held_out.tokens) == (900, 100)


def test_what_changes_is_noticed_and_a_copy_is_the_same(tmp_path):
    file = made_in(tmp_path / "corpus", "megatron")
    corpus = build_corpus(section(file), ByteTokenizer())
    copy = shutil.copytree(tmp_path / "corpus", tmp_path / "copy")
    again = build_corpus(section(copy), ByteTokenizer())
    assert again.digest == corpus.digest and again.folder != corpus.folder and not corpus.problem()
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    assert "m.bin has other ids" in corpus.problem()
    assert build_corpus(section(file), ByteTokenizer()).digest != corpus.digest
    file.write_bytes(raw[:-2])
    assert "bytes, not" in corpus.problem()
    with pytest.raises(TrainctlError, match=r"m\.bin has .* bytes, not .*, since this run read it"):
        corpus.tokens(corpus.train)[:5]
    with pytest.raises(TrainctlError, match="its index ends at id"):
        build_corpus(section(file), ByteTokenizer())


def test_an_id_that_no_look_has_seen_is_refused_when_it_is_read(tmp_path):
    file = tmp_path / "long.npy"
    ids = np.ones(3_000_000, "<u2")
    ids[20_000] = 60_000
    np.save(file, ids)
    corpus = build_corpus(section(file, held_out_fraction=0), Unended())
    tokens = corpus.tokens(corpus.train)
    assert len(tokens[:20_000]) == 20_000
    with pytest.raises(TrainctlError, match="has the id 60,000 at token 20,000, and the vocab"):
        tokens[19_990:20_010]


class Unended(ByteTokenizer):
    begin_of_text = begin_of_document = ()
    end_of_document = None


def test_all_that_is_wrong_is_reported_before_a_launch_and_by_the_build(tmp_path):
    folder = tmp_path / "corpus"
    made_in(folder / "a", "megatron", [[5, 300, END]])
    broken = made_in(folder / "b", "megatron")
    broken.write_bytes(broken.read_bytes()[2:])
    made_in(folder / "c", "flat")
    config = RunConfig()
    config.data = section(folder)
    found = missing_files(config)
    assert {finding.rule for finding in found} == {"TC360"} and len(found) == 3
    said = " ".join(finding.message for finding in found)
    for part in ("has the id 300 at token 1", "its index ends at id", "of which type the ids in"):
        assert part in said
    with pytest.raises(TrainctlError, match=r"\(and 2 more problems\)") as raised:
        build_corpus(config.data, ByteTokenizer())
    assert [each.message for each in raised.value.findings] == [each.message for each in found]
    config.data = section("memory://nowhere/*.bin")
    (folder / "a" / "m.idx").write_bytes(b"")
    config.data = section(folder / "a")
    (finding,) = missing_files(config)
    assert "it is no index of Megatron's" in finding.message


def test_another_tokenizer_is_refused_where_its_name_was_left(tmp_path):
    file = made_in(tmp_path / "corpus", "datatrove")
    with pytest.raises(
        TrainctlError, match="made with the tokenizer 'gpt2', and this run has that"
    ):
        build_corpus(section(file), ByteTokenizer())
    tokenizer = ByteTokenizer()
    tokenizer.file = tmp_path / "gpt2" / "tokenizer.json"
    assert build_corpus(section(file), tokenizer).train.tokens
    metadata = file.with_name(f"{file.name}.metadata")
    copy = tmp_path / "copy.json"
    copy.write_text("{}")
    metadata.write_text(f"{copy}|2\n9\n9T")
    tokenizer.file = tmp_path / "mine.json"
    tokenizer.file.write_text("{}")
    assert build_corpus(section(file, held_out_fraction=0.2), tokenizer).train.tokens


def test_the_commands_know_its_length_and_have_nothing_to_prepare(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = made_in(tmp_path / "corpus", "megatron", DOCUMENTS * 20)
    words = ["recipe=tiny", "data=tokens", f"data.paths=[{file}]"]
    assert run_command(["data", "prepare", *words]) == 0
    out, err = capsys.readouterr()
    assert "tokens to train on" in out and "nothing to tokenize: the ids of 1 file" in err
    sources = f"data.sources={{a: {{kind: tokens, paths: [{file}], weight: 1}}, "
    sources += "b: {kind: stdlib, weight: 1}}"
    assert run_command(["data", "plan", "recipe=tiny", sources, "--json"]) == 0
    of_source = json.loads(capsys.readouterr().out)["sources"]["a"]
    assert not of_source["is_estimate"] and of_source["tokens"] == pytest.approx(
        20 * TOKENS * 0.95, rel=0.01
    )
