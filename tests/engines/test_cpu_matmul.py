"""Products of narrow matrices on a processor without instructions for them.

In a process of its own: the kernels stay where they are registered.
"""

import subprocess
import sys

_PROBE = """
import torch
from trainctl.engines import process


PRODUCTS = {
    "mm": lambda draw: torch.mm(draw(3, 40), draw(40, 5)),
    "bmm": lambda draw: torch.bmm(draw(2, 3, 40), draw(2, 40, 5)),
    "addmm": lambda draw: torch.addmm(draw(5), draw(3, 40), draw(40, 5), beta=0.5, alpha=2),
    "baddbmm": lambda draw: torch.baddbmm(draw(1, 1, 5), draw(2, 3, 40), draw(2, 40, 5), beta=0),
    "transposed": lambda draw: draw(40, 3).t() @ draw(5, 40).t(),
    "empty": lambda draw: draw(3, 0) @ draw(0, 5),
}
AS_THEY_WERE = ("float32", "float64", "float16", "int64")


def made(product, format, through=None):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        values = (4 * torch.randn(*shape, generator=generator)).to(getattr(torch, format))
        return values if through is None else values.to(through)

    return product(draw)


def gradients(format):
    torch.manual_seed(0)
    layer = torch.nn.Linear(40, 5).to(format)
    layer(torch.randn(2, 3, 40).to(format)).square().sum().backward()
    return [weight.grad.float() for weight in layer.parameters()]


def raises(left, right):
    try:
        torch.mm(left, right)
    except RuntimeError:
        return True


before = {
    (name, format): made(product, format)
    for name, product in PRODUCTS.items()
    for format in AS_THEY_WERE
    if format != "int64" or name in ("mm", "transposed", "empty")
}
process.widen_format(torch.bfloat16)
for (name, format), expected in before.items():
    found = made(PRODUCTS[name], format)
    assert torch.equal(found, expected) and found.dtype is expected.dtype, (name, format)
for name, product in PRODUCTS.items():
    found, exact = made(product, "bfloat16"), made(product, "bfloat16", torch.float32)
    assert torch.equal(found, exact.bfloat16()) and found.dtype is torch.bfloat16, name
for narrow, wide in zip(gradients(torch.bfloat16), gradients(torch.float32)):
    assert (narrow - wide).norm() < 0.02 * wide.norm()
narrow = torch.ones(2, 3).bfloat16()
for left, right in ((torch.ones(2, 2), narrow), (narrow, torch.ones(3, 2)), (narrow, narrow)):
    assert raises(left, right)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
    torch.mm(narrow, narrow.t())
assert "aten::to" in {event.name for event in seen.events()}, "it was torch's own kernel"
"""


def test_bf16_products_are_rounded_fp32_products_and_other_formats_are_unchanged() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
