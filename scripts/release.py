"""Make a release: set the version, write the changelog's section, build and check the packages.

    make release VERSION=0.2.0

The wheel is built from the source distribution. Each is installed into an empty environment; with
the wheel, the recipe `tiny` is trained for a few steps in an empty folder. If anything fails, the
changed files are as they were before. Tagging and publishing are left to a person.

With a second argument, the `site-packages` of another environment, the empty environments see its
packages too, and only what is not there is downloaded: a try that takes a minute.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trainctl" / "__init__.py"
CHANGELOG = ROOT / "CHANGELOG.md"
CONSTRAINTS = ROOT / "constraints.txt"
SEMANTIC = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-(alpha|beta|rc)\.(0|[1-9]\d*))?")
"""Semantic versions that packages can have: of pre-releases, those that pip knows."""
UNRELEASED = re.compile(
    r"^## \[Unreleased\]\n(?P<changes>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
SECTION = re.compile(r"^## \[(\d[^\]]*)\]", re.MULTILINE)
DEMO = ("launch", "recipe=tiny", "training.stop_after_steps=5")


def main() -> int:
    """Make the release that the command line names."""
    version, packages = (*sys.argv[1:], "", "")[:2] if len(sys.argv) <= 3 else ("", "")
    text = CHANGELOG.read_text(encoding="utf-8")
    refusal = why_not(version, text)
    if refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    before = {path: path.read_bytes() for path in (PACKAGE, CHANGELOG)}
    try:
        CHANGELOG.write_text(changelog_with(version, text), encoding="utf-8")
        set_version(version)
        files = build(version)
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        for file in files:
            try_out(file, version, packages)
    except BaseException as error:
        for path, content in before.items():
            path.write_bytes(content)
        if not isinstance(error, subprocess.CalledProcessError):
            raise
        print(f"error: {error}; {PACKAGE.name} and {CHANGELOG.name} are restored", file=sys.stderr)
        return 1
    names = " ".join(str(file.relative_to(ROOT)) for file in files)
    print(
        f"\n{version} is built and checked. Next:\n"
        f"  git diff\n"
        f"  git commit --all --message 'Release {version}'\n"
        f"  git tag --annotate v{version} --message v{version}\n"
        f"  git push --follow-tags\n"
        f"  twine upload {names}"
    )
    return 0


def why_not(version: str, changelog: str) -> str:
    """Return why no release can be made; empty if it can."""
    if not SEMANTIC.fullmatch(version):
        return f"VERSION={version} is no semantic version, such as 1.2.3 or 1.2.3-rc.1"
    last = SECTION.search(changelog)
    if last and Version(version) <= Version(last[1]):
        return f"{version} is not above the last release, {last[1]}"
    unreleased = UNRELEASED.search(changelog)
    if unreleased is None or not re.search(r"^- ", unreleased["changes"], re.MULTILINE):
        return f"{CHANGELOG.name} has nothing under [Unreleased]"
    command = ["git", "status", "--porcelain"]
    changed = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return f"there are changes that are not committed:\n{changed.rstrip()}" if changed else ""


def changelog_with(version: str, text: str) -> str:
    """Return the changelog with what was unreleased under the version and today's date."""
    title = f"## [{version}] - {datetime.now(UTC):%Y-%m-%d}\n"
    return UNRELEASED.sub(
        lambda match: f"## [Unreleased]\n\n{title}{match['changes']}", text, count=1
    )


def set_version(version: str) -> None:
    """Write the version into its only place."""
    line = f'__version__ = "{version}"'
    text, count = re.subn(r'^__version__ = ".*"$', line, PACKAGE.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{PACKAGE} has {count} lines with a version"
    PACKAGE.write_text(text)


def build(version: str) -> list[Path]:
    """Return the source distribution, and the wheel that was built from it."""
    run(sys.executable, "-m", "build", "--outdir", ROOT / "dist", ROOT)
    name = f"trainctl-{Version(version)}"
    return [ROOT / "dist" / f"{name}.tar.gz", ROOT / "dist" / f"{name}-py3-none-any.whl"]


def try_out(file: Path, version: str, packages: str) -> None:
    """Install a package into an empty environment; with the wheel, train a few steps.

    Args:
        packages: Folder of packages that the environment sees beside its own; empty for none.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment, empty = Path(folder, "environment"), Path(folder, "empty")
        empty.mkdir()
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        if packages:
            (own,) = environment.glob("lib/python*/site-packages")
            (own / "beside.pth").write_text(f"{packages}\n")
        is_wheel = file.suffix == ".whl"
        # The wheel shows what it requires. The source distribution has to build.
        options = ("--constraint", CONSTRAINTS) if is_wheel else ("--no-deps",)
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", *options, file)
        code = f"import trainctl; assert trainctl.__version__ == {version!r}"
        run(python, "-c", code, where=empty)
        if is_wheel:
            run(environment / "bin" / "trainctl", *DEMO, where=empty)


def run(*command: str | Path, where: str | Path = ROOT) -> None:
    """Run a command and show it."""
    print("$", *command, flush=True)
    subprocess.run(command, cwd=where, check=True)


if __name__ == "__main__":
    sys.exit(main())
