"""Secrets written literally in a configuration, and the environment variables that replace them.

Literal secrets are refused, because the files of a run are read by others. References are resolved
by a launch only, and their values are never written with a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.schema import RunConfig
from trainctl.config.secrets import (
    ENVIRONMENT,
    REDACTED,
    is_env_reference,
    is_env_reference_list,
    is_plain_variable,
    is_secret_name,
    names_in,
    redact_text,
    secret_words,
)
from trainctl.errors import Finding

Path = tuple[Any, ...]
"""Names of keys, and indices of lists, from the root of a configuration."""

LITERAL = "TC167"
WRITTEN = "would be written with the run"

URL_REMEDIES = {
    "checkpoint": "leave out what stands before its @: credentials are those of its client's own "
    "variables and files, such as AWS_PROFILE",
    "logging": "leave out what stands before its @: a tracker's client has variables and files of "
    "its own for it, such as MLFLOW_TRACKING_PASSWORD",
    "data": "leave out what stands before its @, and signatures and tokens in its query: "
    "credentials are those of its client's own variables and files, or fsspec's "
    "(~/.config/fsspec, FSSPEC_FTP_PASSWORD)",
}
"""Hints for URLs with secrets, by section."""


def literal_secrets(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for each literal value that may be a secret; none shows the value."""
    launcher, words = config.launcher, config.script_arguments
    for name, value in launcher.environment.items():
        is_plain = is_plain_variable(name, launcher.plain_environment)
        if value and not is_env_reference(value) and not is_plain:
            yield _variable_finding(name)
    of_secrets = zip(words, secret_words(words), strict=True)
    if any(secret and word and not is_env_reference(word) for word, secret in of_secrets):
        yield _literal_finding(
            "script_arguments",
            f"a secret among the script's arguments {WRITTEN}",
            "refer to a variable, as in --token '${oc.env:TOKEN}': it is resolved at the start; or "
            "have the script read the variable",
        )
    if not is_env_reference_list(config.logging.alerts.urls):
        yield _literal_finding(
            "logging.alerts.urls",
            f"whoever has a webhook's URL can post to it, and it {WRITTEN}",
            "refer to a variable, as in 'logging.alerts.urls=[\"${oc.env:ALERT_URL}\"]': it is "
            "resolved where it is needed",
        )
    free = [(".".join(path), tree) for path, tree in _free_mappings(config)]
    keys = [".".join(map(str, path)) for path in _secret_paths(config)]
    for key in (*keys, *(each for above, tree in free for each in _urls_with_secrets(tree, above))):
        name = key.rpartition(".")[2].upper()
        written = "DeepSpeed's JSON" if key.startswith("deepspeed.") else "the plan"
        yield _literal_finding(
            key,
            f"{key} is a secret, and {written} is written with the run",
            f"leave it out, give ranks the variable that stands for it, such as {ENVIRONMENT}."
            f"{name}='${{oc.env:{name}}}', and read it in the code that needs it",
        )
    for name, value in to_plain(launcher).items():
        if isinstance(value, list) and any(redact_text(word) != word for word in value):
            yield _literal_finding(
                f"launcher.{name}",
                f"launcher.{name} has a secret, which {WRITTEN}",
                f"give ranks the variable, such as {ENVIRONMENT}.HF_TOKEN='${{oc.env:HF_TOKEN}}': "
                "the text is written, and the value taken at the start",
            )
    for section, remedy in URL_REMEDIES.items():
        found = _urls_with_secrets(to_plain(getattr(config, section)), section)
        for key in (key for key in found if not _is_inside(key, [name for name, _ in free])):
            yield _literal_finding(key, f"{key} has a URL with a secret, which {WRITTEN}", remedy)


def _literal_finding(key: str, message: str, hint: str) -> Finding:
    return Finding(rule=LITERAL, key=key, message=message, hint=hint)


def _urls_with_secrets(value: Any, key: str) -> Iterator[str]:
    """Yield the dotted names of keys that hold a URL with a password, signature or token.

    A list counts once.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _urls_with_secrets(inner, f"{key}.{name}")
        return
    for index, inner in enumerate(value if isinstance(value, list) else ()):
        if isinstance(inner, dict | list):
            yield from _urls_with_secrets(inner, f"{key}.{index}")
    if any("://" in each and redact_text(each) != each for each in _texts_in(value)):
        yield key


def _texts_in(value: Any) -> Iterator[str]:
    items = value if isinstance(value, list) else [value]
    return (each for each in items if isinstance(each, str))


def _variable_finding(name: str) -> Finding:
    hint = f"export {name}, and {ENVIRONMENT}.{name}='${{oc.env:{name}}}': the text is written, "
    hint += "and the value taken at the start"
    if not is_secret_name(name):
        hint += f"; if it is no secret, launcher.plain_environment=[{name}]"
    return _literal_finding(
        f"{ENVIRONMENT}.{name}", f"the value of {name} may be a secret, and {WRITTEN}", hint
    )


def without_secrets(config: RunConfig) -> RunConfig:
    """Return a configuration whose secrets in free mappings are redacted.

    A new run has none, but a run of an earlier version may.
    """
    copy = deepcopy(config)
    for path in _secret_paths(copy):
        node: Any = copy
        for name in path[:-1]:
            node = getattr(node, name) if is_dataclass(node) else node[name]
        node[path[-1]] = REDACTED
    return copy


def _is_inside(key: str, above: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{each}.") for each in above)


def _free_mappings(section: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the mappings whose names are not the schema's, such as the arguments of a function.

    `launcher.environment` has a rule of its own.
    """
    for field in fields(section):
        value, inner = getattr(section, field.name), (*path, field.name)
        sections = value if isinstance(value, dict) else {}
        if is_dataclass(value):
            yield from _free_mappings(value, inner)
        elif sections and all(map(is_dataclass, sections.values())):
            for name, each in sections.items():
                yield from _free_mappings(each, (*inner, name))
        elif sections and ".".join(inner) != ENVIRONMENT:
            yield inner, sections


def _secret_paths(config: RunConfig) -> Iterator[Path]:
    """Yield the paths of non-empty values under secret names in the free mappings."""
    for path, tree in list(_free_mappings(config)):
        yield from list(_secrets_in(tree, path))


def _secrets_in(tree: Any, path: Path, *, is_secret: bool = False) -> Iterator[Path]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _secrets_in(value, (*path, name), is_secret=is_secret_name(str(name)))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _secrets_in(value, (*path, index), is_secret=is_secret)
    elif is_secret and tree and not isinstance(tree, bool | float):
        yield path


def referenced_variables(config: RunConfig) -> list[str]:
    """Return the names of all variables that a launch must resolve, sorted."""
    words = config.script_arguments
    texts = [word for word, used in zip(words, secret_words(words), strict=True) if used]
    texts += config.launcher.environment.values()
    texts += config.logging.alerts.urls
    return sorted({name for text in texts if is_env_reference(text) for name in names_in(text)})
