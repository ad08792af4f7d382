"""The folders searched, and what is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainctl.config.catalog import (
    list_options,
    list_recipes,
    search_folders,
    shipped_root,
    split_hardware,
)


def test_the_current_folder_counts_unless_it_is_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shipped_root())
    assert all(folder.is_shipped for folder in search_folders())
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    mine, *shipped = search_folders()
    assert mine.path == tmp_path / "recipes"
    assert not mine.is_shipped
    assert len(shipped) == 2


def test_a_config_dir_comes_before_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here/recipes", "there/recipes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "mine.yaml").write_text(f"# {name}\ndefaults: [tiny, _self_]\n")
    monkeypatch.chdir(tmp_path / "here")
    info = list_recipes(tmp_path / "there")[0]
    assert (info.name, info.summary, info.is_users) == ("mine", "there/recipes", True)
    assert info.hardware == "2xcpu"


def test_options_are_listed_with_what_they_are() -> None:
    found = {info.name: info for info in list_options("zero_stage")}
    assert list(found) == ["0", "1", "2", "3"]
    assert found["3"].summary.startswith("ZeRO-3")
    assert found["3"].path == shipped_root() / "conf/zero_stage/3.yaml"


def test_models_are_in_order_of_size() -> None:
    llamas = [info.name for info in list_options("model") if info.name.startswith("llama")]
    sizes = ("1b", "3b", "7b", "8b", "13b", "70b", "405b")
    assert llamas == [f"llama-{size}" for size in sizes]


def test_recipes_tell_their_hardware_as_it_is_typed() -> None:
    hardware = {info.name: info.hardware for info in list_recipes()}
    assert hardware["tiny"] == "2xcpu"
    assert hardware["7b-zero3"] == "8xh100-80g"
    assert hardware["70b-3d"] == "8x8xh100-80g"
    assert hardware["7b-zero3-nvme"] == "rtx-4090-24g"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("h100-80g", (None, None, "h100-80g")),
        ("8xh100-80g", (None, 8, "h100-80g")),
        ("4x8xh100-80g", (4, 8, "h100-80g")),
        ("2xmi300x-192g", (None, 2, "mi300x-192g")),
        ("mi300x-192g", (None, None, "mi300x-192g")),
        ("x", (None, None, "x")),
    ],
)
def test_counts_are_split_off_the_name(
    written: str, read: tuple[int | None, int | None, str]
) -> None:
    assert split_hardware(written) == read
