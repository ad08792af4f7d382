"""Number formats on a rank: fp8 matrix products."""

from __future__ import annotations

from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import PrecisionConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.precision import is_emulated
from trainctl.train.models.model import blocks


def convert_to_fp8(model: PreTrainedModel, precision: PrecisionConfig) -> int:
    """Convert the linear layers of the decoder blocks to fp8 products; return the number converted.

    Inputs, weights and gradients are rounded with one scale per tensor, computed on use
    (torchao's dynamic scaling, arXiv:2209.05433). Weights stay in bf16 under their names, so
    ZeRO, checkpoints and exports see no difference. Embeddings, norms and the output projection
    are left alone: the output projection decides the loss.

    Args:
        model: The model or its skeleton.
        precision: Precision section with compute in fp8.

    Raises:
        TrainctlError: torchao is missing, or no layer can be converted.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise TrainctlError(
            f"precision.compute=fp8 needs the package torchao ({error})",
            hint="pip install 'trainctl[fp8]', or precision=bf16",
            exit_code=ExitCode.environment,
        ) from None
    config = Float8LinearConfig(emulate=is_emulated(precision))
    layers = blocks(model)
    for layer in layers:
        convert_to_float8_training(layer, config=config)
    converted = sum(isinstance(module, Float8Linear) for module in model.modules())
    if converted == 0:
        raise TrainctlError(
            f"precision.compute=fp8, but none of the {len(layers)} blocks of "
            f"{type(model).__name__} has a linear layer",
            hint="precision=bf16",
        )
    return converted
