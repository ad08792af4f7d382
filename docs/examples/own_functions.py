"""Functions that trainctl calls: one that trains, one that makes the model, one for the text.

trainctl launch recipe=tiny model.factory=own_functions:model data.factory=own_functions:text
trainctl launch recipe=tiny trainer=own_functions:train
"""

from collections.abc import Iterator

from trainctl.config.schema import DataConfig, ModelConfig
from trainctl.data.user_functions import Rank
from trainctl.plans.types import RunPlan


def model(shape: ModelConfig):
    """A Llama with biases in its attention, of the shape that the plan declares.

    Its parameters have no memory while this runs: trainctl fills them afterwards, from the seed or
    from `model.initial_weights`, on each rank only what that rank keeps.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            attention_bias=True,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def text(config: DataConfig, split: str) -> Iterator[str]:
    """The documents of a split, `train` or `held_out`: here sums, with other terms held out."""
    held_out = split == "held_out"
    for a in range(100):
        for b in range(100):
            if ((a + b) % 10 == 0) == held_out:
                yield f"{a} + {b} = {a + b}\n"


def train(plan: RunPlan, rank: Rank) -> None:
    """Fit a line, with the optimizer, batch and precision of the plan."""
    import deepspeed
    import torch

    deepspeed.init_distributed()
    torch.manual_seed(plan.config.training.seed)
    line = torch.nn.Linear(1, 1)
    engine, *_ = deepspeed.initialize(
        model=line, model_parameters=line.parameters(), config=plan.deepspeed
    )
    weights = next(engine.parameters())
    for _ in range(5):
        for _ in range(plan.batch.gradient_accumulation_steps):
            x = torch.rand(plan.batch.micro_batch_size, 1).to(weights)
            loss = (engine(x) - 3 * x).square().mean()
            engine.backward(loss)
            engine.step()
        if rank.rank == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.4f}")
    torch.distributed.barrier()  # a rank that leaves early cuts off those that still talk
    engine.destroy()
    torch.distributed.destroy_process_group()
