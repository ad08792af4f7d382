"""Text sampled from the model at the end of a run."""

from __future__ import annotations

from trainctl.options.callbacks import Callback, Context
from trainctl.runs.heartbeats import Phase
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.evaluation import inference, sampled_ids
from trainctl.train.prompts import prompts_of
from trainctl.train.session import Session


class Sampling(Callback):
    """Samples `training.sample_tokens` tokens after each prompt, when training is done.

    Raises:
        TrainctlError: The chat template refuses a prompt; before the first step.
    """

    def __init__(self, session: Session, now: StepState, journal: Journal) -> None:
        self._session, self._now, self._journal = session, now, journal
        training = session.plan.config.training
        self._prompts = prompts_of(session.plan.config.data, session.tokenizer)
        self._chosen = [(text, self._prompts.ids(text)) for text in training.sample_prompts]

    def on_train_end(self, context: Context) -> None:
        if not self._now.is_done:
            return
        session, journal = self._session, self._journal
        journal.beat(Phase.end, "sampling text")
        if not self._chosen:
            prompt = session.plan.config.training.sample_prompt
            ids = session.tokenizer.encode(prompt).tolist() or [0]
            drawn = self._generate(ids, temperature=0.8)
            journal.record(
                "sample", step=context.step, text=session.tokenizer.decode([*ids, *drawn])
            )
        for prompt, ids in self._chosen:  # greedy decoding
            text = session.tokenizer.decode(self._generate(ids))
            journal.record("sample", step=context.step, prompt=prompt, text=text)

    def _generate(self, ids: list[int], *, temperature: float = 0.0) -> list[int]:
        """Generate a continuation of the prompt `ids`; on all ranks together."""
        session = self._session
        training = session.plan.config.training
        with inference(session.engine.module):
            return sampled_ids(
                session.engine.next_scores,
                ids,
                num_tokens=training.sample_tokens,
                window=training.sequence_length,
                seed=training.seed,
                vocab_size=session.tokenizer.vocab_size,
                ends=self._prompts.ends,
                temperature=temperature,
            )
