"""What plans say of DualPipeV is what DeepSpeed's schedule does."""

from collections import Counter

import pytest
from deepspeed.runtime.pipe import schedule
from rank_processes import tiny_config, tiny_plan

from trainctl.memory.budget import budget
from trainctl.memory.engine import read_engine
from trainctl.memory.rank import activations_of_rank, micro_batches_in_flight
from trainctl.memory.stages import folded_stages, pipeline_stages
from trainctl.plans.derive import idle_micro_batches

FORWARD, BACKWARD = 1, 2
"""Time of the passes of one stage."""


def plan(ranks, **changes):
    config = tiny_config(
        steps=1,
        zero_stage__stage=1,
        parallelism__pipeline=ranks,
        gradient_accumulation_steps=2 * ranks,
        global_batch_size=4 * ranks,
        **{"model__num_layers": 2 * ranks + 1, **changes},
    )
    return tiny_plan(config, ranks)


def folded(ranks, **changes):
    return plan(ranks, parallelism__pipeline_schedule="dualpipev", **changes)


class Rank:
    """A rank that runs DeepSpeed's schedule; a commit waits for both ends of each transfer."""

    def __init__(self, ranks, micro_batches, rank):
        made = schedule.DualPipeVSchedule(micro_batches, ranks, rank)
        self.rank, self.todo = rank, [each for step in made.steps() for each in step][::-1]
        self.time, self.busy, self.queued, self.waits = 0, 0, [], None
        self.sent, self.held, self.most = Counter(), Counter(), Counter()

    def transfer(self, instruction):
        """Return the ends of a transfer, its number between them, and whether this rank sends."""
        name = type(instruction).__name__
        is_down = (name in ("SendActivation", "RecvGrad")) == (instruction.phase == 0)
        ends = (self.rank, self.rank + (1 if is_down else -1))
        ends = ends if name.startswith("Send") else ends[::-1]
        self.sent[ends] += 1
        return *ends, self.sent[ends]

    def run(self, begun):
        """Go on until a transfer has no other end yet; `begun` has times by transfer and rank."""
        while self.todo:
            instruction = self.todo[-1]
            kind, phase = type(instruction).__name__, getattr(instruction, "phase", None)
            if kind == "CommitP2P":
                if self.waits is None:
                    self.waits, self.queued = self.queued, []
                    for each in self.waits:
                        begun.setdefault(each, {})[self.rank] = self.time
                if any(len(begun[each]) < 2 for each in self.waits):
                    return
                self.time = max([self.time, *(max(begun[each].values()) for each in self.waits)])
                self.waits = None
            elif kind.startswith(("Send", "Recv")):
                self.queued.append(self.transfer(instruction))
            elif kind in ("ForwardPass", "BackwardPass"):
                is_forward = kind == "ForwardPass"
                self.time += FORWARD if is_forward else BACKWARD
                self.busy += FORWARD if is_forward else BACKWARD
                self.held[phase] += 1 if is_forward else -1
                self.most[phase] = max(self.most[phase], self.held[phase])
            self.todo.pop()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [2, 5])
def test_idle_time_and_micro_batches_in_flight_are_those_of_the_schedule(ranks, times):
    made, begun = [Rank(ranks, times * ranks, rank) for rank in range(ranks)], {}
    while any(rank.todo for rank in made):
        for rank in made:
            rank.run(begun)
    of = folded(ranks)
    idle = idle_micro_batches(of.config.parallelism) * 2 * (FORWARD + BACKWARD)
    assert max(rank.time for rank in made) - made[0].busy == pytest.approx(idle)
    stages = pipeline_stages(of.config.model, stage_blocks=of.stage_blocks)
    for rank in made:
        own = [stages[stage] for stage in of.stages_of(rank.rank)]
        assert [micro_batches_in_flight(of, each) for each in own] == [
            rank.most[phase] for phase in (0, 1)
        ]


def test_a_rank_holds_both_its_stages_and_a_tied_matrix_once():
    for tied in (True, False):
        of = folded(2, model__tie_word_embeddings=tied)
        (whole,) = pipeline_stages(of.config.model)
        held = folded_stages(pipeline_stages(of.config.model, stage_blocks=of.stage_blocks))
        assert sum(stage.parameters for stage in held) == whole.parameters
        assert [stage.has_embedding and stage.has_head for stage in held] == [True, False]
        found = [stage.components.parameters for stage in budget(of).stages]
        assert found == [4 * stage.parameters for stage in held]


def test_every_rank_keeps_the_activations_of_as_many_blocks():
    of, other = (make(2, model__num_layers=4) for make in (folded, plan))
    assert (of.stage_blocks, other.stage_blocks) == ((1, 1, 1, 1), (2, 2))

    def kept(of, stages):
        engine = read_engine(of)
        return [activations_of_rank(of, engine, stage).forward_end for stage in stages]

    stages = pipeline_stages(of.config.model, stage_blocks=of.stage_blocks)
    first, last = kept(other, pipeline_stages(of.config.model, stage_blocks=other.stage_blocks))
    assert first == 2 * last
    assert kept(of, folded_stages(stages)) == [first * 5 / 4] * 2
