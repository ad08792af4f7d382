"""Uploads to a hub that speaks the API of the Hugging Face hub, and what is loaded from there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from commands import trainctl
from fabricated import fabricate
from hub_server import TOKEN, HubServer, hub_server
from made_runs import append, new_run, step
from safetensors.torch import load

import trainctl as tc
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers import export
from trainctl.runs.layout import RunPaths


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as found:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield found


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_an_upload_is_one_commit_and_removes_weights_that_are_no_longer_there(
    tmp_path: Path, server: HubServer
) -> None:
    shards = {f"model-0000{n}-of-00002__safetensors": b"a" * n for n in (1, 2)}
    folder = write(tmp_path / "out", README__md=b"# x", config__json=b"{}", **shards)
    assert export.check_repository("hub:me/x", public=False) == "me/x"
    made = export.upload(folder, "me/x", public=False, message="step-00000001 of x")
    repository = server.repositories["me/x"]
    assert repository.private and len(repository.commits) == 2
    assert made["commit"] == repository.at("main")[0] and made["private"] is True
    given = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert server.files("me/x").items() >= given.items()

    repository.commit({**server.files("me/x"), "LICENSE": b"mine"})
    folder = write(tmp_path / "second", README__md=b"# y", model__safetensors=b"b")
    export.upload(folder, "me/x", public=False, message="step-00000002 of x")
    assert {*server.files("me/x")} == {
        ".gitattributes", "LICENSE", "README.md", "config.json", "model.safetensors"
    }  # fmt: skip
    assert server.files("me/x")["README.md"] == b"# y" and len(repository.commits) == 4


@pytest.mark.parametrize("fails", ["POST .*objects/batch", "PUT /lfs/", "POST .*/commit/"])
def test_a_failed_upload_commits_nothing_and_can_be_repeated(
    tmp_path: Path, server: HubServer, fails: str
) -> None:
    folder = write(tmp_path / "out", README__md=b"# x", model__safetensors=b"weights")
    server.fail = fails
    with pytest.raises(TrainctlError, match="nothing was committed: ") as caught:
        export.upload(folder, "me/x", public=True, message="m")
    assert caught.value.exit_code is ExitCode.environment
    assert TOKEN not in f"{caught.value.message}{caught.value.hint}"
    assert "same command again" in caught.value.hint
    assert len(server.repositories["me/x"].commits) == 1
    server.fail = None
    export.upload(folder, "me/x", public=True, message="m")
    assert server.files("me/x")["model.safetensors"] == b"weights"
    assert not server.repositories["me/x"].private


def test_a_hub_that_keeps_other_content_is_found(tmp_path: Path, server: HubServer) -> None:
    server.corrupt = True
    folder = write(tmp_path / "out", README__md=b"# x", model__safetensors=b"weights")
    with pytest.raises(TrainctlError, match=r"has another model\.safetensors than was sent"):
        export.upload(folder, "me/x", public=False, message="m")


def test_what_cannot_be_uploaded_is_refused_before_the_export(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(TrainctlError, match="names no repository"):
        export.check_repository("hub:x", public=False)
    export.upload(write(tmp_path / "out", README__md=b"# x"), "me/x", public=True, message="m")
    with pytest.raises(TrainctlError, match="me/x is a public repository"):
        export.check_repository("hub:me/x", public=False)
    assert export.check_repository("hub:me/x", public=True) == "me/x"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(TrainctlError, match="cannot be looked up") as caught:
        export.check_repository("hub:me/x", public=True)
    assert "hf_wrong" not in caught.value.message
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(TrainctlError, match="needs a token") as caught:
        export.check_repository("hub:me/x", public=True)
    assert caught.value.exit_code is ExitCode.environment
    run = tc.Run(new_run(tmp_path / "run").root)
    for options, said in (
        ({"to": "gguf"}, "--to gguf names no OUT"),
        ({"to": "hup:me/x", "out": "x"}, "none of transformers, gguf"),
        ({"to": "gguf", "out": "x", "public": True}, "is no upload"),
        ({"to": "gguf", "out": "x", "card": True}, "--card is not an option"),
    ):
        with pytest.raises(TrainctlError, match=said):
            run.checkpoint().export(**options)  # type: ignore[arg-type]


def test_an_export_that_differs_is_not_uploaded(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = {"checkpoint": "step-00000001", "check": {"equal": False}}
    monkeypatch.setattr(export, "export_files", lambda *_, **__: made)
    run = tc.Run(new_run(tmp_path / "run").root)
    assert run.checkpoint().export(to="hub:me/x", check=True) == made
    assert server.repositories == {}


@pytest.mark.slow
def test_what_transformers_loads_from_the_hub_is_the_checkpoint(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", "training.steps=40")
    append(run, (step(number) for number in range(1, 31)))
    checkpoint = fabricate(RunPaths(run.root), tc.Run(run.root).plan.details.plan.config.model)
    with hub_server() as server:
        settings = {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hf"),
        }
        said = trainctl("export", "run", "--to", "hub:me/tiny", "--check", cwd=tmp_path, **settings)
        assert "uploaded to" in said and "(private)" in said and "\nequal" in said
        assert TOKEN not in said
        program = (
            "from transformers import AutoModelForCausalLM\n"
            "AutoModelForCausalLM.from_pretrained('me/tiny').save_pretrained('again')\n"
        )
        subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | settings, check=True
        )
        sent = load(server.files("me/tiny")["model.safetensors"])
        card = server.files("me/tiny")["README.md"].decode()
    again = load((tmp_path / "again" / "model.safetensors").read_bytes())
    assert sent.keys() == again.keys() and all((sent[name] == again[name]).all() for name in sent)
    assert f"| checkpoint | step {int(checkpoint.name[-8:]):,}, " in card and "loss.png" in card
    assert str(tmp_path) not in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hf", "run"]
    written = b"".join(path.read_bytes() for path in run.root.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written
