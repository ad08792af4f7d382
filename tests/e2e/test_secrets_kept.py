"""Secrets planted in every way in reach the program, and nothing that is written or shown."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from commands import trainctl

from trainctl.cli.main import run as command

SCRIPT = """
import hashlib, os, sys

names = ("HF_TOKEN", "FORWARDED_API_KEY", "HEADER")
values = [*(os.environ[name] for name in names), sys.argv[2]]
digests = [hashlib.sha256(value.encode()).hexdigest()[:12] for value in values]
print("has", *digests, sys.argv[3], flush=True)
"""
LAUNCHERS = {
    "local": [],
    "slurm": ["launcher=slurm"],
    "mpi": ["launcher=mpi"],
    "ssh": ["launcher=ssh", "launcher.hosts=[a]"],
    "kubernetes": [
        "launcher=kubernetes", "launcher.kubernetes_image=i", "launcher.kubernetes_claims={c: /}",
        "launcher.kubernetes_secret=keys",
    ],
}  # fmt: skip


def canary(number: int) -> str:
    return f"canary-{number}-5d1c"


def assert_nothing_shown(text: str | bytes) -> None:
    assert ("canary" if isinstance(text, str) else b"canary") not in text


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_a_program_gets_its_secrets_and_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    run = tmp_path / "run"
    variables = {
        "MINE": canary(0),
        "FORWARDED_API_KEY": canary(1),
        "WORD": canary(2),
        "SLURM_JWT": canary(3),
        "HF_AUTH": canary(4),
    }
    said = trainctl(
        "launch", "script=own.py", "recipe=tiny", "hardware=1xcpu",
        "training.gradient_accumulation_steps=null", "launcher.environment.HF_TOKEN=${oc.env:MINE}",
        "launcher.environment={HEADER: 'Bearer ${oc.env:MINE}'}",
        "launcher.forward_environment=[FORWARDED_*]", "--run-dir", str(run),
        "--", "--token", "${oc.env:WORD}", "own=${oc.env:WORD}",
        cwd=tmp_path, **variables,
    )  # fmt: skip
    values = [canary(0), canary(1), f"Bearer {canary(0)}", canary(2)]
    digests = [hashlib.sha256(value.encode()).hexdigest()[:12] for value in values]
    has = f"has {' '.join(digests)} own=${{oc.env:WORD}}"
    assert has in said
    assert_nothing_shown(said)
    said = trainctl("resume", str(run), cwd=tmp_path, **variables)
    assert has in said
    assert_nothing_shown(said)
    for words in (["config", "show", run], ["config", "why", "launcher.environment", run],
                  ["runs", "status", run, "--json"], ["runs", "logs", run]):  # fmt: skip
        assert_nothing_shown(trainctl(*map(str, words), cwd=tmp_path))
    for file in [path for path in run.rglob("*") if path.is_file()]:
        assert_nothing_shown(file.read_bytes())
    assert "${oc.env:MINE}" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_no_launcher_writes_or_shows_a_secret(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINE", canary(0))
    monkeypatch.setenv("FORWARDED_API_KEY", canary(1))
    overrides = [
        "recipe=tiny", *LAUNCHERS[kind], "launcher.environment.HF_TOKEN=${oc.env:MINE}",
        "launcher.forward_environment=[FORWARDED_*]", "hardware.nodes=1",
    ]  # fmt: skip
    for flags in ([], ["--json"]):
        assert command(["launch", "--dry-run", *flags, *overrides]) == 0
        said = capfd.readouterr()
        assert_nothing_shown(said.out + said.err)
    if kind == "kubernetes":
        assert "secretKeyRef" in said.out and '\\"key\\": \\"MINE\\"' in said.out
