"""Test of the data source: the documents of a file, with their lines."""

from pathlib import Path

from trainctl.config.registry import load_spec, new_section, trust_folder
from trainctl.readers.documents import Reader

trust_folder(Path(__file__).parents[1] / "options")


def test_the_documents_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.fortunes"
    file.write_text("one\ntwo\n--\nthree\n")
    section = new_section("data", "fortunes", divider="--")
    documents = [(each.text, each.line) for each in Reader(section).documents([file])]
    assert documents == [("one\ntwo", 1), ("three\n", 4)]
    problem = load_spec("data", "fortunes").problem
    assert problem(file, section) is None
    file.write_text("")
    assert problem(file, section).message == f"{file} is empty"
