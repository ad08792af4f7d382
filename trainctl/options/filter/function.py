"""A user's function that returns a score for a text."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_least, at_most


@dataclass
class FunctionConfig(FilterConfig):
    """The function, and the range of accepted scores."""

    call: str = option(
        "",
        "Your own scoring function, as `module:function`; it is called with a document's text "
        "and returns a number.",
        example="mine.quality:score",
    )
    minimum: float | None = option(None, "Minimum score; documents below it are dropped.")
    maximum: float | None = option(None, "Maximum score; documents above it are dropped.")


SPEC = Filter(
    name="function",
    keys=FunctionConfig,
    build="trainctl.data.quality.statistics:user_function",
    bounds=at_least(minimum="score") + at_most(maximum="score"),
    settings=("call",),
)
