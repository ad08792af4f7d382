"""Alerts about the events of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema.option import option


class AlertKind(Enum):
    """Event that can raise an alert."""

    failure = "failure"
    """An attempt failed, or checkpoints do not reach `checkpoint.mirror`."""
    restart = "restart"
    """A new attempt replaces a failed one."""
    spike = "spike"
    """The trainer intervened because a loss or gradient norm is not finite or jumped; or the loss
    diverges, which is only a warning.
    """
    straggler = "straggler"
    """A rank is slower than the others."""
    no_progress = "no_progress"
    """No step for `no_progress_minutes`."""
    end = "end"
    """The launch has ended, successfully or not."""


@dataclass
class AlertsConfig:
    """Alerts about the events of a run, sent by a process beside the launcher."""

    urls: list[str] = option(
        [],
        "Webhook URLs that receive each alert as JSON by POST, with a Slack-compatible `text` "
        "field; a URL is a secret, so set it by reference to an environment variable.",
        example="['${oc.env:SLACK_URL}']",
    )
    command: list[str] = option(
        [],
        "Program and its arguments, started without a shell and given the alert as JSON on stdin.",
        example="[notify-send,trainctl]",
        runs_code=True,
    )
    kinds: list[AlertKind] = option(
        list(AlertKind), "Events that send an alert.", example="[failure,no_progress,end]"
    )
    no_progress_minutes: float = option(
        30.0,
        "Time without a completed step after which a `no_progress` alert is sent.",
        unit="minutes",
        above=0,
    )

    @property
    def are_wanted(self) -> bool:
        """Whether any alert would be sent."""
        return bool(self.kinds and (self.urls or self.command))
