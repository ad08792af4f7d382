"""Environment variables that a configuration refers to.

Their values are resolved by a launch only, and never written with a run.
"""

from __future__ import annotations

from trainctl.config.schema import RunConfig
from trainctl.config.secrets import is_env_reference, names_in, secret_words


def references(config: RunConfig) -> list[str]:
    """Return the names of all variables that a launch must resolve, sorted."""
    words = config.script_arguments
    texts = [word for word, used in zip(words, secret_words(words), strict=True) if used]
    texts += config.launcher.environment.values()
    texts += config.logging.alerts.urls
    return sorted({name for text in texts if is_env_reference(text) for name in names_in(text)})
