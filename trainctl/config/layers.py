"""Layered settings, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from trainctl.config.check import UNKNOWN_KEY, WRONG_VALUE, Setting, check_setting, has_reference
from trainctl.config.codec import value_at
from trainctl.config.keys import as_written, find_leaf, is_removal, leaves, leaves_under
from trainctl.config.schema import LIST_GROUPS
from trainctl.config.secrets import (
    ENVIRONMENT,
    SECRET_LISTS,
    is_env_reference,
    is_env_reference_list,
    is_secret_name,
)
from trainctl.config.suggest import did_you_mean, first_line, nearest_names
from trainctl.config.yaml_files import read_scalar
from trainctl.errors import Finding, Severity

ONE_LEVEL = "TC421"
VALUE = "_value_"
ALTERNATIVES = (
    ("training.steps", "training.tokens", "training.epochs"),
    ("training.global_batch_size", "training.global_batch_tokens"),
    ("schedule.warmup_steps", "schedule.warmup_tokens", "schedule.warmup_fraction"),
    ("schedule.decay_steps", "schedule.decay_tokens", "schedule.decay_fraction"),
)
"""Keys that express the same quantity in different units: at most one of each row may be set."""
DEFAULT_SOURCE = "default"
"""Start of the source of a value that was reset to its default; the cause follows it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A value that was set for a key, and the place that set it."""

    source: str
    value: Any


class Stack:
    """A configuration as plain data, and the layers of each key that was set.

    Args:
        source: Name of that configuration; empty for the schema's defaults, which are no layer.
    """

    def __init__(self, plain: dict[str, Any], source: str = "") -> None:
        # A saved configuration lacks these groups, and these keys, while they are empty.
        self.plain = {**{group: {} for group in LIST_GROUPS}, **deepcopy(plain)}
        for name in ("score_outputs", "future_blocks"):
            self.plain["model"].setdefault(name, None)
        self.layers: dict[str, list[Layer]] = {}
        self.references: dict[str, Setting] = {}
        for key, leaf in (leaves_under(plain) if source else {}).items():
            value = value_at(self.plain, key)
            if value != leaf.default:
                self.layers[key] = [Layer(source, value)]

    def is_set(self, key: str) -> bool:
        """Whether a key has a value that was set, and not reset to its default since."""
        return key in self.layers and not self.layers[key][-1].source.startswith(DEFAULT_SOURCE)

    def apply(self, settings: Iterable[Setting], note: str = "") -> None:
        """Set keys in order, so that the last one wins; `note` is appended to the sources."""
        for setting in settings:
            source = f"{setting.source} {note}".rstrip()
            if is_removal(setting.path, setting.value):
                self._remove_sections(setting)
                continue
            self._place(setting)
            self.layers.setdefault(setting.key, []).append(Layer(source, setting.value))
            above = setting.key
            while above := above.rpartition(".")[0]:  # a mapping that is not empty any more
                if above in self.layers and self.layers[above][-1].value == {}:
                    del self.layers[above]

    def apply_level(self, settings: Sequence[Setting], note: str = "") -> list[Finding]:
        """Set the keys of one file or of the command line.

        If a key has alternatives (`ALTERNATIVES`) that an earlier level set, they are reset.

        Returns:
            A warning for each value that is reset; an error where two alternatives are set here.
        """
        findings = list(self._unknown_removals(settings))
        self.apply(settings, note)
        last = {setting.key: setting for setting in settings}
        for keys in ALTERNATIVES:
            here = [last[key] for key in keys if key in last and last[key].value is not None]
            if len(here) > 1:
                findings.append(_set_at_one_level(here))
            elif here:
                findings += self._reset_alternatives(
                    [key for key in keys if key != here[0].key], here[0]
                )
        return findings

    def _remove_sections(self, setting: Setting) -> None:
        """Remove a named section, or all sections of a mapping, with the keys set in them."""
        for key in list(self.layers):
            if f"{key}.".startswith(f"{setting.key}."):
                del self.layers[key]
                self.references.pop(key, None)
        node = self.plain
        for name in setting.path[:-1]:
            node = node.get(name, {})
        node.pop(setting.path[-1], None)

    def _unknown_removals(self, settings: Sequence[Setting]) -> Iterator[Finding]:
        for setting in settings:
            above, _, name = setting.key.rpartition(".")
            is_typed = setting.text is not None  # else a section that a whole one replaces
            if is_typed and above in leaves() and is_removal(setting.path, setting.value):
                group, _, mapping = above.partition(".")
                known = list(self.plain[group].get(mapping, {}))
                is_set_here = any(each.key.startswith(f"{setting.key}.") for each in settings)
                if name not in known and not is_set_here:
                    near = did_you_mean([f"~{above}.{each}" for each in nearest_names(name, known)])
                    yield Finding(
                        rule=UNKNOWN_KEY,
                        key=setting.key,
                        message=f"there is no {setting.key} to be removed",
                        hint=near or f"{above} has {', '.join(known) or 'none'}",
                        source=setting.source,
                    )

    def _reset_alternatives(self, keys: Sequence[str], instead: Setting) -> Iterator[Finding]:
        for key in keys:
            leaf, value = leaves()[key], self.layers[key][-1].value if self.is_set(key) else None
            if value is None or leaf.default is not None:  # fractions yield silently
                continue
            source = self.layers[key][-1].source
            note = f"{DEFAULT_SOURCE} (replaced by {instead.source})"
            self.apply([Setting(tuple(key.split(".")), None, note)])
            if key == "training.epochs" and self.is_set("training.epoch_tokens"):
                self.apply([Setting(("training", "epoch_tokens"), None, note)])  # belongs to epochs
            yield Finding(
                rule=ONE_LEVEL,
                key=instead.key,
                message=f"{_override_text(instead)} replaces {key}={as_written(value)} of {source}",
                severity=Severity.warning,
                source=instead.source,
            )

    def reset(self, section: str, source: str) -> None:
        """Reset the keys that were set in a section to their defaults."""
        for key in [key for key in reversed(self.layers) if key.startswith(f"{section}.")]:
            leaf, mapping = leaves().get(key), find_leaf(tuple(key.split(".")))
            # A key inside a named section or an option's own section.
            is_inside = mapping is not None and (mapping.kinds or mapping.metadata.get("each"))
            if leaf is None and is_inside:
                del self.layers[key]
                self._remove(key)
            if leaf is not None:
                self.apply([Setting(tuple(key.split(".")), deepcopy(leaf.default), source)])

    def _remove(self, key: str) -> None:
        """Remove a key from its mapping, and mappings that become empty from theirs."""
        above, _, name = key.rpartition(".")
        node = value_at(self.plain, above)
        node.pop(name, None)
        if not node and above not in leaves():
            self._remove(above)

    def resolve(self) -> list[Finding]:
        """Replace references (`${training.steps}`, `${oc.env:NAME}`) by their values."""
        if not self.references:
            return []
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        findings: list[Finding] = []
        for setting in self.references.values():
            try:
                OmegaConf.create({VALUE: setting.value})
            except OmegaConfBaseException as error:  # malformed, such as "${"
                findings.append(_unresolved_error(setting, first_line(error)))
        if findings:
            return findings
        known = OmegaConf.create(self._without_secrets())
        for setting in list(self.references.values()):
            try:
                with _secrets_refused():
                    known[VALUE] = setting.value
                    value = known[VALUE]
                    if OmegaConf.is_config(value):
                        value = OmegaConf.to_container(value, resolve=True)
            except (OmegaConfBaseException, RecursionError, ValueError) as error:
                findings.append(_unresolved_error(setting, first_line(error)))
                continue
            text = value if isinstance(value, str) else None
            value = value if text is None else read_scalar(text)  # environment variables are text
            checked, problems = check_setting(replace(setting, value=value, text=text))
            findings += problems
            for each in checked:
                self._place(each)
                self.layers.setdefault(each.key, []).append(Layer(each.source, each.value))
        return findings

    def _without_secrets(self) -> dict[str, Any]:
        """Return the configuration without variables and secrets, which only a launch resolves."""
        plain = deepcopy(self.plain)
        variables = plain["launcher"]["environment"]
        plain["launcher"]["environment"] = {
            name: value for name, value in variables.items() if not has_reference(value)
        }
        for key in SECRET_LISTS:
            section, _, name = key.rpartition(".")
            value_at(plain, section)[name] = []
        return plain

    def _place(self, setting: Setting) -> None:
        node = self.plain
        for name in setting.path[:-1]:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        name = setting.path[-1]
        if setting.value == {} and isinstance(node.get(name), dict):
            return  # an empty mapping changes no existing one
        node[name] = deepcopy(setting.value)
        is_variable = setting.key.startswith(f"{ENVIRONMENT}.") and is_env_reference(setting.value)
        is_variable |= setting.key in SECRET_LISTS and is_env_reference_list(setting.value)
        if has_reference(setting.value) and not is_variable:
            self.references[setting.key] = setting
        else:
            self.references.pop(setting.key, None)


_resolvers = Lock()
"""Held while a resolver is replaced: OmegaConf's resolvers are the process's."""


@contextmanager
def _secrets_refused() -> Iterator[None]:
    """Make `${oc.env:NAME}` refuse names of secrets outside the keys that a launch resolves.

    Other keys are written to the run directory with their resolved values. Afterwards the resolver
    is OmegaConf's own again, for a program that uses it beside trainctl.
    """
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def variable(name: str, *default: Any) -> Any:
        if is_secret_name(name):
            raise ValueError(f"{name} looks like a secret, and this key is written with the run")
        return oc.env(name, *default)

    with _resolvers:
        OmegaConf.register_new_resolver("oc.env", variable, replace=True)
        try:
            yield
        finally:
            OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _override_text(setting: Setting) -> str:
    return f"{setting.key}={setting.text or as_written(setting.value)}"


def _set_at_one_level(here: Sequence[Setting]) -> Finding:
    written = [_override_text(setting) for setting in here]
    return Finding(
        rule=ONE_LEVEL,
        key=here[-1].key,
        message=f"{' and '.join(written)} say the same thing, and only one can hold",
        hint=f"keep one: {' or '.join(written)}",
        source=", ".join(dict.fromkeys(setting.source for setting in here)),
    )


def _unresolved_error(setting: Setting, why: str) -> Finding:
    # The value may be a secret, such as the default of a variable.
    is_variable = setting.key.startswith((ENVIRONMENT, *SECRET_LISTS))
    shown = "the reference" if is_variable else repr(setting.value)
    return Finding(
        rule=WRONG_VALUE,
        key=setting.key,
        message=f"{shown} cannot be resolved: {why}",
        hint="refer to a key by its full name, as ${training.steps}, or to ${oc.env:NAME}",
        source=setting.source,
    )
