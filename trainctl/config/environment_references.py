"""Variables of the environment whose values no run writes: only a launch resolves them."""

from __future__ import annotations

from trainctl.config.schema import RunConfig
from trainctl.config.secrets import is_kept, names_in, secret_words


def references(config: RunConfig) -> list[str]:
    """Variables that a start needs the values of, as the configuration refers to them."""
    words = config.script_arguments
    texts = [word for word, used in zip(words, secret_words(words), strict=True) if used]
    texts += config.launcher.environment.values()
    texts += config.logging.alerts.urls
    return sorted({name for text in texts if is_kept(text) for name in names_in(text)})
