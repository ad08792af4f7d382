"""A DeepSpeed program as it is written everywhere: argparse, `deepspeed.initialize(args=...)`.

It knows nothing of trainctl, which starts it as

    trainctl launch script=deepspeed_script.py recipe=tiny -- --steps 20

and adds `--deepspeed_config FILE`. It also runs under DeepSpeed's own launcher.
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    arguments = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(0)  # the same weights on every rank
    width = arguments.width
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 1))
    engine, *_ = deepspeed.initialize(
        args=arguments, model=model, model_parameters=model.parameters()
    )

    generator = torch.Generator().manual_seed(1 + dist.get_rank())  # other data on every rank
    dtype = next(engine.parameters()).dtype
    passes = arguments.steps * engine.gradient_accumulation_steps()
    for _ in range(passes):
        size = (engine.train_micro_batch_size_per_gpu(), width)
        inputs = torch.randn(size, generator=generator).to(engine.device, dtype)
        loss = (engine(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()
        engine.backward(loss)
        is_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_boundary and dist.get_rank() == 0:
            print(f"step {engine.global_steps} of {arguments.steps}: loss {loss.item():.4f}")
    dist.barrier()  # a rank that leaves early cuts off those that still talk
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
