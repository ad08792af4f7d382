"""The files of a configuration and their order, by Hydra's defaults list.

Hydra receives only the defaults lists, from documents that were read before. The settings of the
files are layered by `trainctl.config.compose`. Importing this module imports Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainctl.config.catalog import Folder, find_config_file, option_names
from trainctl.config.suggest import first_line
from trainctl.config.yaml_files import UNREADABLE, read_document, read_text
from trainctl.errors import Finding

SCHEME = "trainctl"
ROOT = "_trainctl_root"
Answer = tuple[str | None, bool]
"""Text of the file at a config path, or None, and whether there is a group of that name."""
HYDRA_CONFIG = "hydra/config"
"""Config path of Hydra's own application settings: a dozen files that are not used here."""


class SearchedFolders(ConfigSource):  # type: ignore[misc]  # Hydra has no types
    """Hydra's view of the searched folders: the same files, found in the same order."""

    folders: ClassVar[list[Folder]] = []
    asked: ClassVar[set[str]] = set()
    """Config paths that Hydra requested."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the defaults list and the package of a file; empty for Hydra's own files."""
        self.asked.add(config_path)
        found = find_config_file(self.folders, config_path)
        written: list[Any] = []
        header: dict[str, str | None] = {"package": None}
        if found is not None:
            folder, path = found
            document = read_document(path, folder.name_of(path))
            written = [default.written for default in document.defaults]
            header = self._get_header_dict(read_text(path))
        config = OmegaConf.create({"defaults": written})
        return ConfigResult(self.provider, self.full_path(), config, header)

    def is_group(self, config_path: str) -> bool:
        self.asked.add(config_path)
        return _is_group(self.folders, config_path)

    def is_config(self, config_path: str) -> bool:
        self.asked.add(config_path)
        return (
            config_path == HYDRA_CONFIG or find_config_file(self.folders, config_path) is not None
        )

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the options of a group, for Hydra's own messages."""
        return option_names(self.folders, config_path)


def _is_group(folders: list[Folder], config_path: str) -> bool:
    return any((folder.path / config_path).is_dir() for folder in folders)


def _answer_for_path(folders: list[Folder], config_path: str) -> Answer:
    found = find_config_file(folders, config_path)
    return (read_text(found[1]) if found else None), _is_group(folders, config_path)


def _answers_are_current(folders: list[Folder], answers: dict[str, Answer]) -> bool:
    try:
        return all(_answer_for_path(folders, path) == answer for path, answer in answers.items())
    except (OSError, ValueError):  # Hydra reads it again and reports it
        return False


_known: dict[str, tuple[dict[str, Answer], list[tuple[str, str]]]] = {}
"""Cache by defaults list: the answers that Hydra received, and the order it computed. Hydra takes
90 ms each time, and a sweep composes the same files again and again.
"""
_hydra = Lock()
"""Held while Hydra works: its registries, and the folders it is shown, are the process's."""


def files_in_order(
    folders: list[Folder], defaults: Sequence[Any]
) -> list[tuple[str, str]] | Finding:
    """Return the config path and package of each file, in the order of merging.

    Args:
        folders: Searched folders; the first that has a file wins.
        defaults: Defaults list of a root configuration above all files, which sets no keys itself.

    Returns:
        The files, or the finding that says why Hydra cannot order them.
    """
    key = repr(defaults)
    answers, files = _known.get(key, ({}, []))
    if answers and _answers_are_current(folders, answers):
        return list(files)
    with _hydra:
        found = _ask_hydra(folders, defaults)
    if not isinstance(found, Finding):
        _known[key] = found
        return list(found[1])
    return found


def _ask_hydra(
    folders: list[Folder], defaults: Sequence[Any]
) -> tuple[dict[str, Answer], list[tuple[str, str]]] | Finding:
    """Return the answers that Hydra received about paths, and the order that it computed."""
    Plugins.instance().register(SearchedFolders)
    SearchedFolders.folders, SearchedFolders.asked = folders, set()
    node = {"defaults": [*defaults, "_self_"], "hydra": {"searchpath": [f"{SCHEME}://"]}}
    ConfigStore.instance().store(name=ROOT, node=node)
    try:
        # This folder has no YAML. `initialize` would read the source of all stack frames: 50 ms.
        with initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            listed = loader.compute_defaults_list(ROOT, [], RunMode.RUN).defaults
        answers = {path: _answer_for_path(folders, path) for path in SearchedFolders.asked}
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        return Finding(
            rule=UNREADABLE,
            message=f"Hydra cannot compose these files: {first_line(error)}",
            hint="look at the defaults lists of your own recipes and options",
        )
    files = [
        (item.config_path, (item.package or "").removeprefix("_global_").strip("."))
        for item in listed
        if item.config_path and item.config_path not in (ROOT, HYDRA_CONFIG)
    ]
    return answers, files
