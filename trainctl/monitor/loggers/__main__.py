"""`python -m trainctl.monitor.loggers RUN_DIR NAME [--follow | --again]`: send metrics to a logger.

`trainctl.runs.companion` says when it sends, and how it ends.
"""

from __future__ import annotations

import sys

from trainctl.monitor.loggers.alerts import Alerter
from trainctl.monitor.loggers.delivery import ALERTS
from trainctl.monitor.loggers.follower import Follower
from trainctl.runs.companion import Sender, serve
from trainctl.runs.layout import RunPaths


def _make(run: RunPaths, name: str) -> Sender:
    return Alerter(run) if name == ALERTS else Follower(run, name)


if __name__ == "__main__":
    sys.exit(
        serve(
            None,
            _make,
            prog="python -m trainctl.monitor.loggers",
            ends_by_itself=lambda name: name == ALERTS,
        )
    )
