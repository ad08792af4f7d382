"""Rules of plans, by subject; importing the package registers them. Each checks a `Draft`."""

from trainctl.rules.plan import (
    batch,
    data,
    documents,
    engine,
    experts,
    kernels,
    layout,
    model,
    no_effect,
    optimizer,
    precision,
    rollouts,
    run,
    trainable,
    zero,
)
