"""Process reward model: the probability that each step of an answer is right."""

from __future__ import annotations

from trainctl.options.data import SampleKind
from trainctl.options.objective import SCORES, Objective
from trainctl.options.objective.reward import HEAD

SPEC = Objective(
    name="process_reward",
    build="trainctl.train.objectives.scores:process_reward",
    takes=SampleKind.steps,
    reads=SCORES,
    head=HEAD,
    measures=("accuracy", "probability", "label"),
    whole_samples="a step's label is found by the number of steps before it",
)
