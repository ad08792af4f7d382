"""Explanation of a value: its sources, what derives from it, and what it derives from."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, get_args

from trainctl.config.codec import flatten, from_plain, to_plain, value_at
from trainctl.config.compose import ComposedConfig
from trainctl.config.derived import DerivedValue
from trainctl.config.keys import (
    Leaf,
    ValueProblem,
    convert_value,
    described_leaf,
    find_leaf,
    leaves,
    sections,
)
from trainctl.config.registry import kind_of
from trainctl.config.schema import RunConfig
from trainctl.config.suggest import nearest_names
from trainctl.errors import TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.plans.types import RunPlan
from trainctl.rules.keyword_search import KEY, find_by_keywords
from trainctl.rules.resolve import resolve
from trainctl.tuning.assess import plain_kernels_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Answer of `config why`; values are plain data."""

    key: str
    """A config key, a key of DeepSpeed's JSON, or a quantity of the plan."""
    value: Any
    """Value in effect."""
    reason: str = ""
    """Derivation of the value; empty if it was not derived."""
    layers: tuple[dict[str, Any], ...] = ()
    """Sources that set a config key, each with its value; the last one won."""
    default: Any = None
    """Default of a config key in the schema."""
    is_key: bool = False
    became: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keys of the JSON, and other derived values, that follow from a config key, with their
    values.
    """
    sources: tuple[Explanation, ...] = ()
    """Config keys that a derived value follows from, each explained."""
    doc: str = ""
    """Description of a config key."""

    def _origin(self) -> str:
        """Return where the value came from: its last source, unless the value was derived."""
        if self.reason and (not self.layers or self.layers[-1]["value"] != self.value):
            return f"derived: {self.reason}"
        return f"set by {self.layers[-1]['source'] if self.layers else 'the default of the schema'}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without fields that do not apply."""
        shown: dict[str, Any] = {
            "key": self.key,
            "value": self.value,
            "reason": self.reason,
            "layers": list(self.layers),
            "doc": self.doc,
        }
        if self.is_key:
            shown |= {"default": self.default, **self.became}
        if self.sources:
            shown["sources"] = [each.to_json() for each in self.sources]
        return shown

    def lines(self) -> list[str]:
        """Return the explanation as lines of text."""
        shown = [f"{self.key} = {_value_text(self.value)}"]
        if self.reason:
            shown.append(f"  because: {self.reason}")
        width = max((len(_value_text(layer["value"])) for layer in self.layers), default=0)
        for layer in self.layers:
            won = ", which wins" if layer is self.layers[-1] and len(self.layers) > 1 else ""
            shown.append(f"  {_value_text(layer['value']):<{width}}  set by {layer['source']}{won}")
        if self.is_key and not self.layers:
            shown.append("  the default of the schema")
        elif self.is_key:
            shown.append(f"  {_value_text(self.default)} is the default of the schema")
        for source in self.sources:
            shown.append(f"  {source.key} = {_value_text(source.value)}, {source._origin()}")
        names = {
            "deepspeed": "in DeepSpeed's JSON",
            "engine": "for the engine",
            "derived": "derived from it",
        }
        for kind, items in self.became.items():
            listed = ", ".join(f"{name} = {_value_text(value)}" for name, value in items.items())
            shown.append(f"  {names[kind]}: {listed or 'nothing'}")
        return [*shown, f"  {self.doc}"] if self.doc else shown


def explain(key: str, composed: ComposedConfig, plan: RunPlan | None) -> Explanation | None:
    """Explain a key or a quantity of the plan; None if there is no such name.

    Without a plan, only config keys can be explained, and no derived values.
    """
    derived = {item.key: item for item in plan.derived} if plan else {}
    own = derived.get(key)
    leaf = find_leaf(tuple(key.split(".")))
    is_key = leaf is not None and (key in leaves() or key in composed.layers)
    if not is_key:
        if own is None:
            return None
        return Explanation(
            key=key,
            value=to_plain(own.value),
            reason=own.reason,
            sources=_source_explanations(own, composed, plan),
        )
    described = described_leaf(tuple(key.split(".")))
    assert leaf is not None and described is not None
    layers = tuple(
        {"source": each.source, "value": to_plain(each.value)}
        for each in composed.layers.get(key, ())
    )
    return Explanation(
        key=key,
        value=to_plain(own.value) if own else to_plain(value_at(composed.config, key)),
        reason=_reason(own, plan) if own and plan else "",
        layers=layers,
        default=described.default,
        is_key=True,
        became=_settings_and_quantities(leaf.key, plan)
        if plan is not None and key in leaves()
        else {},
        doc=described.metadata["doc"],
    )


def _reason(own: DerivedValue, plan: RunPlan) -> str:
    cost = plain_kernels_cost(plan) if own.key.startswith("kernels.") else ""
    predicted = f"; kernels=plain: {cost} a device, as predicted" if cost else ""
    return f"{own.reason}{predicted}"


def explain_known(key: str, composed: ComposedConfig, plan: RunPlan | None) -> Explanation:
    """Return the explanation of a value, as `explain`.

    Raises:
        TrainctlError: There is no such key or quantity; the error names the nearest.
    """
    answer = explain(key, composed, plan)
    if answer is None:
        raise unknown_key_error(key, composed, plan)
    return answer


def _source_explanations(
    own: DerivedValue, composed: ComposedConfig, plan: RunPlan | None
) -> tuple[Explanation, ...]:
    found = [explain(name, composed, plan) for name in own.sources if name != own.key]
    return tuple(each for each in found if each is not None)


def _settings_and_quantities(key: str, plan: RunPlan) -> dict[str, dict[str, Any]]:
    settings = {name for name, _ in flatten(plan.deepspeed or plan.settings)}
    items = derived_from(key, plan)
    became = {
        "deepspeed" if plan.deepspeed else "engine": {
            item.key: to_plain(item.value) for item in items if item.key in settings
        }
    }
    others = {item.key: to_plain(item.value) for item in items if item.key not in settings}
    return became | ({"derived": others} if others else {})


def _value_text(value: Any) -> str:
    return "null" if value is None else str(value)


def unknown_key_error(key: str, composed: ComposedConfig, plan: RunPlan | None) -> TrainctlError:
    """Return the error for a key that does not exist, with similar names."""
    if key in sections():
        inside = [name for name in leaves() if name.startswith(f"{key}.")]
        return TrainctlError(
            f"{key} is a section", hint=f"ask for a key of it, such as {', '.join(inside[:4])}"
        )
    known = [*leaves(), *(item.key for item in plan.derived if plan)] if plan else [*leaves()]
    # A short key, such as `lr`, is most likely the end of a longer one.
    near = [name for name in known if name.rpartition(".")[2] == key] or nearest_names(key, known)
    near = list(dict.fromkeys(near))
    elsewhere = [] if near else find_by_keywords(key.replace(".", " "))
    keys = [each.word for each in elsewhere if each.kind == KEY][:3]
    hint = f"did you mean {', '.join(near or keys)}?" if near or keys else ""
    hint += f" `trainctl explain {key}` finds more" if elsewhere else ""
    hint = hint.strip() or "trainctl config show lists the keys"
    return TrainctlError(f"there is no key or quantity {key}", hint=hint)


def derived_from(key: str, plan: RunPlan) -> list[DerivedValue]:
    """Return the derived values of a plan that depend on a key, in the plan's order."""
    moved = _changed_by(key, plan)
    return [
        item
        for item in plan.derived
        if item.key != key and (key in item.sources or item.key in moved)
    ]


def _changed_by(key: str, plan: RunPlan) -> set[str]:
    """Return the names of the derived values that another value of the key would change."""
    before = {item.key: item.value for item in plan.derived}
    kinds = leaves()[key].kinds
    if kinds and kind_of(getattr(plan.config, key.partition(".")[0])) not in kinds:
        return set()
    for value in _other_values(leaves()[key], to_plain(value_at(plan.config, key))):
        plain = deepcopy(to_plain(plan.config))
        section, _, name = key.rpartition(".")
        (value_at(plain, section) if section else plain)[name] = value
        config = from_plain(RunConfig, plain)
        is_hardwares = key.startswith("hardware.")
        hardware = resolve_hardware(config.hardware) if is_hardwares else plan.hardware
        other = resolve(config, hardware).plan
        if other is not None:
            after = {item.key: item.value for item in other.derived}
            return {name for name in before if name in after and before[name] != after[name]}
    return set()


def _other_values(leaf: Leaf, value: Any) -> Iterator[Any]:
    """Yield a few legal values other than the key's own; none for names, lists and mappings."""
    candidates: list[Any] = []
    if isinstance(value, (list, dict)):
        return
    kinds = [kind for kind in get_args(leaf.hint) or (leaf.hint,) if isinstance(kind, type)]
    kind = next((each for each in kinds if each is not type(None)), str)
    if kind is bool:
        candidates = [not value]
    elif kind is int:
        candidates = [2 * value, value + 1, value // 2, value - 1] if value is not None else [1, 2]
    elif kind is float:
        candidates = [value / 2, value * 2, 0.5] if value is not None else [0.5, 2.0]
    elif leaf.choices:
        candidates = [*leaf.choices]
    if type(None) in kinds:
        candidates.append(None)
    for candidate in candidates:
        try:
            accepted = convert_value(leaf, candidate)
        except ValueProblem:
            continue
        if accepted != value:
            yield accepted
