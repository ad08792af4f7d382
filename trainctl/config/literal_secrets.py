"""Secrets written literally in a configuration, and the environment variables that replace them.

Literal secrets are refused, because the files of a run are read by others. References are resolved
by a launch only, and their values are never written with a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.schema import RunConfig
from trainctl.config.secrets import (
    ENVIRONMENT,
    is_env_reference,
    is_env_reference_list,
    is_plain_variable,
    is_secret_name,
    names_in,
    redact_text,
    secret_words,
)
from trainctl.errors import Finding

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
    for key in _secret_keys(config.deepspeed, "deepspeed"):
        name = key.rpartition(".")[2].upper()
        yield _literal_finding(
            key,
            f"{key} is a secret, and DeepSpeed's JSON is written with the run",
            "leave it out, and give ranks the variable that stands for it, such as "
            f"{ENVIRONMENT}.{name}='${{oc.env:{name}}}'",
        )
    own = config.callbacks
    for key in (*_secret_keys(own, "callbacks"), *_urls_with_secrets(own, "callbacks")):
        name = key.rpartition(".")[2].upper()
        yield _literal_finding(
            key,
            f"{key} is a secret, and the plan is written with the run",
            f"leave it out, give ranks the variable, such as {ENVIRONMENT}.{name}="
            f"'${{oc.env:{name}}}', and read it in the callback",
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
        for key in _urls_with_secrets(to_plain(getattr(config, section)), section):
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
    elif any("://" in each and redact_text(each) != each for each in _texts_in(value)):
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


def _secret_keys(tree: Any, key: str) -> Iterator[str]:
    """Yield the dotted keys of non-empty values under secret names in a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, value in items:
        inner = f"{key}.{name}"
        if isinstance(value, dict | list):
            yield from _secret_keys(value, inner)
        elif value and isinstance(name, str) and is_secret_name(name):
            yield inner


def referenced_variables(config: RunConfig) -> list[str]:
    """Return the names of all variables that a launch must resolve, sorted."""
    words = config.script_arguments
    texts = [word for word, used in zip(words, secret_words(words), strict=True) if used]
    texts += config.launcher.environment.values()
    texts += config.logging.alerts.urls
    return sorted({name for text in texts if is_env_reference(text) for name in names_in(text)})
