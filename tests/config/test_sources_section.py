"""`data.sources`: a section for each source, of whatever kind, set by files and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.compose import compose, compose_leniently, recompose
from trainctl.config.schema import DataFromRecords, RunConfig, SourceConfig
from trainctl.errors import TrainctlError
from trainctl.options.data import document_identity
from trainctl.readers.check import check_text
from trainctl.readers.files import split_files

RECIPE = """\
defaults: [tiny, _self_]
data:
  sources:
    code:  {paths: [c/*.txt], weight: 0.7}
    prose: {paths: [c/*.jsonl], text_key: body, weight: 0.3, max_epochs: 4}
    shipped: {kind: stdlib}
  stages:
    - {until_tokens: 1M}
    - {weights: {code: 0.2, prose: 0.8}, sequence_length: 128}
"""


@pytest.fixture(autouse=True)
def _recipe(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mix.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)


def findings_of(*overrides):
    with pytest.raises(TrainctlError) as raised:
        compose(["recipe=mix", *overrides])
    return {finding.key: finding for finding in raised.value.findings}


def test_a_source_has_the_keys_of_its_kind_and_of_a_mixture():
    data = compose(["recipe=mix", "data.sources.code.weight=0.6"]).config.data
    code, prose, shipped = data.sources.values()
    assert isinstance(prose, SourceConfig) and isinstance(prose, DataFromRecords)
    assert (prose.kind, prose.text_key, prose.max_epochs, prose.on_bad_text.value) == (
        "files",
        "body",
        4.0,
        "error",
    )
    assert (code.weight, shipped.kind, shipped.weight) == (0.6, "stdlib", None)
    assert not hasattr(shipped, "paths") and split_files(shipped).train
    assert data.stages[0].until_tokens == 10**6 and data.stages[1].weights["prose"] == 0.8
    assert data.kind == "stdlib"


def test_how_much_is_drawn_of_it_does_not_change_what_it_is():
    sources = compose(["recipe=mix"]).config.data.sources
    more = compose(["recipe=mix", "data.sources.shipped.weight=0.5"]).config.data.sources
    assert document_identity(sources["shipped"]) == document_identity(more["shipped"])
    assert document_identity(sources["code"]) != document_identity(sources["prose"])


def test_it_is_written_and_read_without_the_keys_of_the_whole_run():
    config = compose(["recipe=mix"]).config
    plain = to_plain(config)
    assert "shuffle" not in plain["data"]["sources"]["code"]
    assert from_plain(RunConfig, plain) == config
    plain["data"]["sources"]["code"]["shuffle"] = True
    with pytest.raises(ValueError, match=r"unknown key data\.sources\.code\.shuffle"):
        from_plain(RunConfig, plain)


def test_a_saved_one_is_changed_key_by_key():
    saved = compose(["recipe=mix"]).config
    changed = recompose(saved, ["data.sources.prose.weight=0.4", "data.sources.new.kind=stdlib"])
    assert list(changed.config.data.sources) == ["code", "prose", "shipped", "new"]
    assert changed.config.data.sources["prose"].text_key == "body"
    assert changed.config.data.sources["prose"].weight == 0.4
    assert recompose(saved, ["data=stdlib"]).config.data.sources == {}


def test_an_option_chosen_on_the_command_line_replaces_them_all():
    data = compose(["recipe=mix", "data=files", "data.paths=[a]"]).config.data
    assert data.sources == {} and data.stages == [] and data.paths == ["a"]


def test_everything_wrong_is_reported_at_once_with_the_source_and_what_set_it():
    found = findings_of(
        "data.sources.code.weigth=1",
        "data.sources.prose.weight=0",
        "data.sources.x=3",
        "data.sources.z={pahts:[a],weight:q}",
        "data.sources.code.shuffle=true",
        "data.sources.shipped.text_key=t",
        "data.stages=[{unti:3}]",
    )
    assert set(found) == {
        "data.sources.code.weigth",
        "data.sources.prose.weight",
        "data.sources.x",
        "data.sources.z.pahts",
        "data.sources.z.weight",
        "data.sources.code.shuffle",
        "data.sources.shipped.text_key",
        "data.stages",
    }
    assert "data.sources.code.weight" in found["data.sources.code.weigth"].hint
    assert found["data.sources.prose.weight"].rule == "TC103"
    assert found["data.sources.x"].message == "expected a section, got 3"
    assert found["data.sources.z.pahts"].source == "data.sources.z={pahts:[a],weight:q}"
    assert "did you mean until?" in found["data.stages"].hint
    foreign = found["data.sources.shipped.text_key"]
    assert foreign.message.endswith("with data.sources.shipped.kind=stdlib")
    assert "only with kind: arrow, csv, files, labelled, parquet or webdataset" in foreign.hint


@pytest.mark.parametrize("name", ["a b", "a.b", "ä", "-a"])
def test_a_name_is_a_word(name):
    write(RECIPE.replace("shipped:", f'"{name}":'))
    composed = compose_leniently(["recipe=mix"])
    assert [finding.key for finding in composed.findings] == [f"data.sources.{name}"]
    assert "is no name" in composed.findings[0].message


def test_a_file_names_the_line_of_a_key():
    write(RECIPE.replace("max_epochs: 4", "max_epochs: four"))
    assert findings_of()["data.sources.prose.max_epochs"].source == "recipes/mix.yaml:5"


def write(recipe):
    Path("recipes/mix.yaml").write_text(recipe)


def test_what_is_wrong_with_a_source_names_its_keys_and_its_files(tmp_path):
    (tmp_path / "data.x.jsonl").write_text('{"body": "x"}\n')
    paths = "paths: [data.x.jsonl, data.jsonl]"
    config = compose([f"data.sources={{a: {{kind: files, {paths}, weight: 1}}}}"]).config
    missing, keyless = check_text(config)
    assert missing.key == "data.sources.a.paths"
    assert missing.message == "no file matches 'data.jsonl'"
    assert keyless.message.startswith(f"{tmp_path}/data.x.jsonl:1: no text")
    assert keyless.hint == "data.sources.a.text_key=body"


def test_a_source_does_not_train_on_what_another_holds_out(tmp_path):
    (tmp_path / "c").mkdir()
    for number in range(20):
        (tmp_path / "c" / f"{number}.txt").write_text(f"{number} words, enough of them " * 200)
    (tmp_path / "p.jsonl").write_text('{"body": "some words"}\n' * 2000)

    def found(*overrides):
        also = ["data.sources.prose.paths=[p.jsonl]", *overrides]
        config = compose(["recipe=mix", "data.sources.code.held_out_fraction=0.2", *also]).config
        return [finding for finding in check_text(config) if finding.rule == "TC350"]

    more = "data.sources.more={kind:files,paths:[c],weight:1,held_out_fraction:%s}"
    assert not found() and not found(more % "0.2"), "the same files are on the same side"
    (finding,) = found(more % "0.05")
    assert finding.key == "data.sources.more.held_out_fraction" and finding.is_error
    assert ".txt and 19 more, of which data.sources.code holds out other d" in finding.message
    by_file = ["data.sources.code.held_out_by=file", "data.sources.more.held_out_by=file"]
    (finding,) = found(more % "0.05", *by_file)
    assert ".txt and 2 more, which data.sources.code holds out" in finding.message
    (finding,) = found(more % "0.5")
    assert finding.key == "data.sources.code.held_out_fraction", "`more` holds out all of them"
    assert len(found(more % "0.2", "data.sources.more.held_out_seed=1")) == 2
    assert not found(more % "0.05", "data.decontaminate=[held_out]")
    assert not found(more % "0.05", "data.dedup=exact")
