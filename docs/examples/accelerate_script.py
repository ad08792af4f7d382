"""A script as accelerate's examples are: `Accelerator()`, `prepare`, a loop, `save_state`.

It knows nothing of trainctl, which starts it as

    trainctl launch recipe=tiny script=accelerate_script.py script_config_flag=null -- --steps 20

and sets what `accelerate launch` would set: that decides how it trains.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--backend", help="such as gloo, for DeepSpeed on CPUs")
    arguments = parser.parse_args()
    handlers = [InitProcessGroupKwargs(backend=arguments.backend)] if arguments.backend else []
    accelerator = Accelerator(kwargs_handlers=handlers)
    print(
        f"{accelerator.distributed_type.value}: {accelerator.num_processes} processes", flush=True
    )
    set_seed(0)
    inputs = torch.randn(64, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    step, folder = 0, Path(arguments.output_dir, "checkpoint")
    has_saved = arguments.resume_from_checkpoint is not None
    if arguments.resume_from_checkpoint:
        accelerator.load_state(arguments.resume_from_checkpoint)
        step = int(Path(arguments.resume_from_checkpoint, "step").read_text())
        accelerator.print(f"resumed at step {step}", flush=True)
    while step < arguments.steps:
        for features, wanted in data:
            with accelerator.accumulate(model):
                loss = (model(features) - wanted).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
                weight = accelerator.unwrap_model(model).weight.sum().item()
                told = f"loss {losses.mean():.4f}, sum of weights {weight:.9f}"
                print(f"step {step} of {len(losses)} ranks: {told}", flush=True)
            if step >= arguments.steps:
                break
        # No rank may ask the file system here: it could see what another one has just written.
        if step >= 4 and not has_saved:
            has_saved = True
            accelerator.save_state(str(folder))
            if accelerator.is_main_process:
                (folder / "step").write_text(str(step))
                folder.with_name("done").touch()
            accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
