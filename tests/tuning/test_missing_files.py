"""Missing files are found before anything starts, each with the key that names it."""

from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.tuning.input_files import missing_files


def test_each_missing_file_is_named_and_what_is_there_is_not(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    config = RunConfig()
    config.data = new_section(
        "data",
        "files",
        paths=[str(tmp_path / "*.txt"), str(tmp_path / "none" / "**" / "*.jsonl")],
        held_out_paths=[str(tmp_path / "b.txt")],
    )
    config.tokenizer = new_section("tokenizer", "file", path=str(tmp_path / "t.json"))
    config.model.initial_weights = str(tmp_path)
    found = missing_files(config)
    assert [finding.key for finding in found] == [
        "data.paths",
        "data.held_out_paths",
        "tokenizer.path",
    ]
    assert "none" in found[0].message and "*.txt" not in found[0].message


def test_files_that_are_not_used_are_not_looked_for(tmp_path):
    (tmp_path / "train.py").touch()
    config = RunConfig()
    config.script = str(tmp_path / "train.py")
    config.data = new_section("data", "files", paths=["nowhere"])
    config.tokenizer = new_section("tokenizer", "hf", path="nowhere")
    assert missing_files(config) == []
