"""A user's function that returns a score for a text."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.filter import Filter, FilterConfig, at_least, at_most


@dataclass
class FunctionConfig(FilterConfig):
    """The function, and the range of accepted scores."""

    call: str = option(
        "", "`module:function`, called with a text; gives a number.", example="mine.quality:score"
    )
    minimum: float | None = option(None, "Documents of less go.")
    maximum: float | None = option(None, "Documents of more go.")


SPEC = Filter(
    name="function",
    keys=FunctionConfig,
    build="trainctl.data.quality.lists:function",
    bounds=at_least(minimum="score") + at_most(maximum="score"),
    settings=("call",),
)
