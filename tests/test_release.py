"""`make release`: what it refuses, what it writes, and the packages that it builds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHANGES = "# Changelog\n\n## [Unreleased]\n{}\n## [0.2.0] - 2026-11-01\n### Added\n- Old.\n"


def git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=Somebody", "-c", "user.email=somebody@localhost")
    subprocess.run(["git", *name, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def release(folder: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this environment's packages; `make install` shows what is required."""
    packages = sysconfig.get_path("purelib")
    command = [sys.executable, folder / "scripts" / "release.py", version, packages]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Committed repository with the files that a release reads, but nothing to build."""
    for name in ("scripts", "trainctl"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "scripts" / "release.py", tmp_path / "scripts")
    (tmp_path / "trainctl" / "__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES.format("### Added\n- New.\n"))
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Begin")
    return tmp_path


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("", "no semantic version"),
        ("1.2", "no semantic version"),
        ("v1.2.3", "no semantic version"),
        ("1.02.3", "no semantic version"),
        ("1.2.3-next", "no semantic version"),
        ("0.2.0", "not above the last release, 0.2.0"),
        ("0.2.0-rc.1", "not above the last release, 0.2.0"),
    ],
)
def test_a_version_that_is_none_is_refused(repository: Path, version: str, message: str) -> None:
    done = release(repository, version)
    assert done.returncode == 2 and message in done.stderr


def test_nothing_new_is_refused(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text(CHANGES.format("### Added\n"))
    done = release(repository, "0.3.0")
    assert done.returncode == 2 and "nothing under [Unreleased]" in done.stderr


def test_a_dirty_tree_is_refused(repository: Path) -> None:
    (repository / "new.txt").write_text("")
    done = release(repository, "0.3.0")
    assert done.returncode == 2 and "?? new.txt" in done.stderr


def test_what_cannot_be_built_changes_nothing(repository: Path) -> None:
    done = release(repository, "0.3.0")
    assert done.returncode == 1 and "are restored" in done.stderr
    status = ["git", "status", "--porcelain"]
    assert not subprocess.run(status, cwd=repository, capture_output=True, check=True).stdout


@pytest.mark.slow
def test_a_release_of_this_repository(tmp_path: Path) -> None:
    """A clone of it, so of what is committed."""
    folder, version = tmp_path / "clone", "99.0.0-rc.1"
    git(tmp_path, "clone", "--quiet", str(ROOT), str(folder))
    done = release(folder, version)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted(path.name for path in (folder / "dist").iterdir())
    assert files == ["trainctl-99.0.0rc1-py3-none-any.whl", "trainctl-99.0.0rc1.tar.gz"]
    assert "git tag --annotate v99.0.0-rc.1" in done.stdout and "twine upload" in done.stdout
    text = (folder / "CHANGELOG.md").read_text()
    assert f"## [Unreleased]\n\n## [{version}] - {datetime.now(UTC).year}" in text
    changed = ["git", "diff", "--numstat"]
    numbers = subprocess.run(changed, cwd=folder, capture_output=True, check=True, text=True).stdout
    assert numbers == "2\t0\tCHANGELOG.md\n1\t1\ttrainctl/__init__.py\n"
