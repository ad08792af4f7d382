"""Table of trainctl's changes to torch and torchao, and of undocumented parts that it uses."""

from __future__ import annotations

from trainctl.engines.patches import (
    ADAPTED,
    EIGHT_BIT_MOMENTS,
    FSDP2,
    LIGER_LOSS,
    SELECTIVE,
    TENSOR,
    At,
    How,
    Table,
    Use,
)

_DISPATCH = "torch.utils._python_dispatch:TorchDispatchMode"

USES = (
    Use(
        target="torch.nn.modules.module:Module.register_parameter",
        how=How.replaced,
        why="while a model is built, so that no parameter ever takes memory or time to initialise",
        signature="(self, name, param)",
        at=At.model,
    ),
    Use(
        target="torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule._apply",
        how=How.called,
        why="shards that were put in the place of those on meta are padded and kept before the "
        "optimizer is told of them, not at the first forward pass",
        contains="fsdp_param.reset_sharded_param()",
        need=FSDP2,
    ),
    Use(
        target="torch.nn.modules.linear:Linear.forward",
        how=How.extended,
        why="an adapter adds a product of two narrow matrices to what a linear layer gives",
        body="9b9e79ddd8dd",
        names=("__class__",),
        need=ADAPTED,
    ),
    Use(
        target="torch.nn.modules.linear:Linear.forward",
        how=How.extended,
        why="a projection out of a tensor-parallel region adds its bias after the sum over ranks",
        body="9b9e79ddd8dd",
        names=("__class__",),
        need=TENSOR,
    ),
    Use(
        target="torch.nn.modules.sparse:Embedding.forward",
        how=How.extended,
        why="a tensor-parallel rank looks up its own tokens",
        body="c06f22dedf9d",
        names=("__class__",),
        need=TENSOR,
    ),
    Use(
        target="torch.nn.modules.linear:Linear.__init__",
        how=How.extended,
        why="the output projection computes the loss, by Liger's kernel",
        signature="(self, in_features, out_features, bias=True, device=None, dtype=None)",
        names=("__class__",),
        need=LIGER_LOSS,
    ),
    Use(
        target=f"{_DISPATCH}.__torch_dispatch__",
        how=How.extended,
        why="what a block gives is kept or given back operation by operation: torch's own "
        "selective checkpointing keeps a product together with what is added to it in place",
        signature="(self, func, types, args=(), kwargs=None)",
        names=("_python_dispatch",),
        need=SELECTIVE,
    ),
    Use(
        target="torch._ops:OpOverload.__init__",
        how=How.read,
        why="which tensors an operation writes to",
        contains="self._schema = schema",
        names=("_ops", "_schema"),
        need=SELECTIVE,
    ),
    Use(
        target="torch.utils._pytree:tree_leaves",
        how=How.called,
        why="tensors among the arguments of an operation",
        signature="(tree, is_leaf=None)",
        names=("_pytree",),
        need=SELECTIVE,
    ),
    Use(
        target="torch.utils._pytree:tree_map_only",
        how=How.called,
        why="tensors among the results of an operation",
        signature="(type_or_types_or_pred, /, func, tree, is_leaf=None)",
        names=("_pytree",),
        need=SELECTIVE,
    ),
    Use(
        target=f"{_DISPATCH}.__init__",
        how=How.extended,
        why="what a model saves for its backward pass is recorded operation by operation",
        signature="(self, _dispatch_key=None)",
        names=("_python_dispatch",),
        at=At.trace,
    ),
    Use(
        target="torch._subclasses.fake_tensor:FakeTensorMode.__init__",
        how=How.called,
        why="a model of any size is traced on tensors without values",
        signature="(self, *, allow_fallback_kernels=True, allow_non_fake_inputs=False, "
        "shape_env=None, static_shapes=None, export=False)",
        names=("_subclasses",),
        at=At.trace,
    ),
    Use(
        target="torch.storage:_StorageBase._cdata",
        how=How.read,
        why="tensors without values have no address to tell their storages apart by",
        contains="_cdata",
        at=At.trace,
    ),
)

TORCH = Table("torch", ("2.8.0", "2.13.0"), USES)

_QUANTISATION = "torchao.optim.quant_utils"
_WHY = "moments in 8 bits are torchao's, in blocks that are counted from a parameter's start"

TORCHAO = Table(
    "torchao",
    ("0.18.0",),
    (
        Use(
            target=f"{_QUANTISATION}:create_dynamic_map",
            how=How.called,
            why=_WHY,
            body="d9b060fa8ae9",
            need=EIGHT_BIT_MOMENTS,
        ),
        Use(
            target=f"{_QUANTISATION}:quantize_8bit_with_qmap",
            how=How.called,
            why=_WHY,
            signature="(input, qmap)",
            need=EIGHT_BIT_MOMENTS,
        ),
        Use(
            target=f"{_QUANTISATION}:dequant_with_qmap",
            how=How.called,
            why=_WHY,
            signature="(codes, qmap, scale)",
            need=EIGHT_BIT_MOMENTS,
        ),
    ),
)
