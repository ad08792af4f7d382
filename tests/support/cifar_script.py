"""Script in the style of DeepSpeedExamples' CIFAR-10, with both the flag and a configuration.

`deepspeed.add_config_arguments` accepts `--deepspeed_config`, and `initialize` gets `args=` and
`config=`. The script knows nothing of trainctl.
"""

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.data import TensorDataset


def configuration(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": arguments.stage},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", type=int, default=1000)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--save", required=True)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 8, 8), torch.randint(10, (64,))
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    engine, _, loader, _ = deepspeed.initialize(
        args=arguments,
        model=network,
        model_parameters=[each for each in network.parameters() if each.requires_grad],
        training_data=TensorDataset(images, labels),
        config=configuration(arguments),
    )
    device = get_accelerator().device_name(engine.local_rank)
    first = 0
    if Path(arguments.save, "latest").is_file():
        _, state = engine.load_checkpoint(arguments.save)
        first = state["epoch"] + 1
    for epoch in range(first, arguments.epochs):
        total = 0.0
        for inputs, wanted in loader:
            loss = nn.functional.cross_entropy(engine(inputs.to(device)), wanted.to(device))
            engine.backward(loss)
            engine.step()
            total += loss.item()
        print(f"epoch {epoch}, step {engine.global_steps}: loss {total / len(loader):.6f}")
        if epoch == 1:
            engine.save_checkpoint(arguments.save, client_state={"epoch": epoch})
    torch.distributed.barrier()
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
