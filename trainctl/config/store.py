"""`config.yaml` of a run: written, read and compared, without Hydra and OmegaConf."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_bytes
from trainctl.config.registry import list_kinds
from trainctl.config.schema import DataConfig, RunConfig, walk_leaves
from trainctl.config.suggest import first_line
from trainctl.config.yaml_files import compose_bounded
from trainctl.errors import RunStateError, TrainctlError


def dump_config(config: RunConfig) -> str:
    """Return the whole configuration as YAML, every key in the schema's order.

    Characters beyond ASCII are escaped, because YAML reads some of them (U+0085) as line breaks.
    """
    return yaml.safe_dump(to_plain(config), sort_keys=False, width=100)


def load_config(path: Path) -> RunConfig:
    """Read a file that `dump_config` wrote; keys that its version did not have keep their
    defaults, or get their former values.

    Raises:
        TrainctlError: The file is missing, unreadable or no configuration (run state), or it uses
            an option that is not installed here (environment).
    """
    try:
        text = read_bytes(path).decode()
        compose_bounded(text)
        data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return from_plain(RunConfig, with_former_values(data))
    except TrainctlError as missing:
        raise TrainctlError(
            f"{path}: {missing.message}", hint=missing.hint, exit_code=missing.exit_code
        ) from None
    except OSError as error:
        raise _unusable_error(path, f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise _unusable_error(path, f"is not valid YAML: {first_line(error)}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise _unusable_error(path, f"is no configuration of trainctl: {error}") from None


def with_former_values(config: Any) -> Any:
    """Return a saved configuration in which keys of `data` that its version did not have get what
    that version did (`former` of `option`), so that a run goes on as it began. The logger `csv`,
    which is no more, is left out (docs/decisions/061).
    """
    logging = config.get("logging") if isinstance(config, dict) else None
    if isinstance(logging, dict) and isinstance(logging.get("to"), list):
        kept = [name for name in logging["to"] if name != "csv" or name in list_kinds("logger")]
        config = {**config, "logging": {**logging, "to": kept}}
    data = config.get("data") if isinstance(config, dict) else None
    if not isinstance(data, dict):
        return config
    former = {
        item.name: item.metadata["former"]
        for item in fields(DataConfig)
        if item.metadata["former"] is not None
    }
    sources = data.get("sources")
    if isinstance(sources, dict):
        sources = {
            name: {**former, **each} if isinstance(each, dict) else each
            for name, each in sources.items()
        }
        data = {**data, "sources": sources}
    return {**config, "data": {**former, **data}}


def _unusable_error(path: Path, what: str) -> TrainctlError:
    return RunStateError(
        f"{path} {what}",
        hint="give a run directory that trainctl made, or start a new run",
    )


@dataclass(frozen=True, slots=True)
class Change:
    """A key with its values in both configurations."""

    key: str
    left: Any
    right: Any


def diff_configs(a: RunConfig, b: RunConfig) -> list[Change]:
    """Return every key whose value differs, in the schema's order.

    A key that one configuration's kind does not have is None there.
    """
    left, right = ({key: value for key, _, value in walk_leaves(each)} for each in (a, b))
    return [
        Change(key, left.get(key), right.get(key))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]
