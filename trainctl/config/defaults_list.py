"""Which files make a configuration, and in which order: Hydra's defaults list over our folders.

Hydra is given the defaults lists alone, from documents that were read already: what the files set
is laid over each other by `trainctl.config.compose`. Importing this module imports Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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

from trainctl.config.catalog import Folder, find, option_names
from trainctl.config.suggest import first_line
from trainctl.config.yaml_files import UNREADABLE, read_document, read_text
from trainctl.errors import Finding

SCHEME = "trainctl"
ROOT = "_trainctl_root"
HYDRAS_OWN = "hydra/config"
"""What Hydra would set up for a program that it runs: a dozen files, and none of them for us."""


class SearchedFolders(ConfigSource):  # type: ignore[misc]  # Hydra has no types
    """Hydra's view of the folders that are searched: the same files, found in the same order."""

    folders: ClassVar[list[Folder]] = []

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """The defaults list and the package of a file; nothing for Hydra's own configuration."""
        found = find(self.folders, config_path)
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
        return any((folder.path / config_path).is_dir() for folder in self.folders)

    def is_config(self, config_path: str) -> bool:
        return config_path == HYDRAS_OWN or find(self.folders, config_path) is not None

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Options of a group, for Hydra's own messages."""
        return option_names(self.folders, config_path)


def files_in_order(
    folders: list[Folder], defaults: Sequence[Any]
) -> list[tuple[str, str]] | Finding:
    """Config path and package of each file, in the order of merging.

    Args:
        folders: Where to look, the first one that has a file wins.
        defaults: Of a configuration that stands above all files; it sets nothing itself.

    Returns:
        The files, or the finding that says why Hydra cannot order them.
    """
    Plugins.instance().register(SearchedFolders)
    SearchedFolders.folders = folders
    node = {"defaults": [*defaults, "_self_"], "hydra": {"searchpath": [f"{SCHEME}://"]}}
    ConfigStore.instance().store(name=ROOT, node=node)
    try:
        # The folder has no YAML; `initialize` would read the sources of the whole stack, for 50 ms.
        with initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            listed = loader.compute_defaults_list(ROOT, [], RunMode.RUN).defaults
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        return Finding(
            rule=UNREADABLE,
            message=f"Hydra cannot compose these files: {first_line(error)}",
            hint="look at the defaults lists of your own recipes and options",
        )
    return [
        (item.config_path, (item.package or "").removeprefix("_global_").strip("."))
        for item in listed
        if item.config_path and item.config_path not in (ROOT, HYDRAS_OWN)
    ]
