"""Callback of the first rank that sleeps."""

from __future__ import annotations

import time

from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context, Ranks


class Sleeping(Callback):
    def __init__(self, keys: CallbackConfig) -> None:
        pass

    def before_step(self, context: Context) -> None:
        assert context.rank == 0
        time.sleep(0.05)


SPEC = CallbackSpec(name="sleeping", build=Sleeping, ranks=Ranks.first)
