"""Faults of a computation, planted from outside into a rank's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context

LAYER, HEAD = 1, 2


@dataclass
class PlantingKeys(CallbackConfig):
    """Keys of the callback."""

    fault: str = option("", "Name of the fault; empty plants none.")


class Planting(Callback):
    """Plants one fault before the first step."""

    def __init__(self, keys: PlantingKeys) -> None:
        self._fault = keys.fault

    def on_train_start(self, context: Context) -> None:
        plant = getattr(self, f"_plant_{self._fault}", None)
        if plant is not None:
            plant(context.module)

    def after_backward(self, context: Context) -> None:
        if self._fault == "unscaled":  # as if the loss were not divided by the accumulation steps
            for part in context.gradients():
                part.values.mul_(len(context.micro_batch_labels))

    def _plant_head(self, module: Any) -> None:
        """Let the attention kernel of one layer be wrong in one head."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        right = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def wrong(layer: Any, *arguments: Any, **settings: Any) -> Any:
            output, weights = right(layer, *arguments, **settings)
            if layer is attention:
                output = output.clone()
                output[:, :, HEAD] *= 1.001
            return output, weights

        (attention,) = (m for n, m in module.named_modules() if n.endswith(f".{LAYER}.self_attn"))
        self._undo = lambda: ALL_ATTENTION_FUNCTIONS.__setitem__("sdpa", right)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = wrong

    def _plant_untied(self, module: Any) -> None:
        """Give the output projection a copy of the embedding's weight in place of the weight."""
        from torch import nn

        (head,) = (each for name, each in module.named_modules() if name.endswith("lm_head"))
        head.weight = nn.Parameter(head.weight.detach().clone())

    def _plant_dropout(self, module: Any) -> None:
        """Drop some activations within the feed-forward layers."""
        import torch.nn.functional as F

        for name, each in module.named_modules():
            if name.endswith("mlp.act_fn"):
                each.register_forward_hook(lambda _, __, output: F.dropout(output, 0.1))

    def close(self) -> None:
        getattr(self, "_undo", lambda: None)()


SPEC = CallbackSpec(name="planting", keys=PlantingKeys, build=Planting)
