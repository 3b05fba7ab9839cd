"""The two sides of a comparison: this package's operators and PyTorch's, as callables over the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.op import Operator
from .case import LAYOUTS, Case

Run = Callable[[], object]


@dataclass(frozen=True)
class Operands:
    x: Tensor  # [N, C, H, W]
    weight: Tensor  # [C * multiplier, 1, kH, kW]
    grad: Tensor  # like the output

    @classmethod
    def make(cls, case: Case, dtype: torch.dtype, device: torch.device) -> Operands:
        """Fresh random operands, channels_last."""
        n, c, h, w = case.input_shape
        if case.sliced:  # a window and some channels of a larger map, as a crop or a split leaves them
            x = _random((n, c + 3, h + 2, w + 1), dtype, device)[:, 1:-2, 1:-1, 1:]
        else:
            x = _random(case.input_shape, dtype, device)
        scale = (case.kernel[0] * case.kernel[1]) ** -0.5
        weight = torch.randn(case.weight_shape, device=device).mul_(scale).to(dtype)
        return cls(x, weight, _random(case.output_shape, dtype, device))

    @classmethod
    def hollow(cls, case: Case, dtype: torch.dtype, device: torch.device, layout: str) -> Operands:
        """Operands that hold nothing yet, for plans."""
        made = cls.make(case, dtype, torch.device("meta")).to(layout, sliced=case.sliced)
        like = (made.x, made.weight, made.grad)
        return cls(*(torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device) for t in like))

    def to(self, layout: str, *, sliced: bool) -> Operands:
        memory_format = LAYOUTS[layout]
        grad = self.grad.contiguous(memory_format=memory_format)
        if not sliced:
            return Operands(self.x.contiguous(memory_format=memory_format), self.weight, grad)
        n, c, h, w = self.x.shape
        parent = torch.empty((n, c + 3, h + 2, w + 1), dtype=self.x.dtype, device=self.x.device)
        window = parent.contiguous(memory_format=memory_format)[:, 1:-2, 1:-1, 1:]
        return Operands(window.copy_(self.x), self.weight, grad)


def ours(case: Case, direction: str, t: Operands) -> Run:
    from flashdwc.ops import depthwise

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return depthwise.depthwise_conv2d(x, weight, None, case.stride, case.pads, case.dilation)

    if direction == "forward":
        return lambda: forward(t.x, t.weight)
    if direction == "train":
        return _train(forward, t)
    ((operator, arguments),) = calls(case, direction, t)
    return lambda: operator(*arguments)


def calls(case: Case, direction: str, t: Operands) -> list[tuple[Operator, tuple]]:
    """The operators that our side runs, with their arguments."""
    from flashdwc.ops import depthwise_operators as operators

    left, right, top, bottom = case.pads
    geometry = (case.stride,) * 2, (top, bottom, left, right), (case.dilation,) * 2, "auto", "auto"
    found = {
        "forward": (operators.forward, (t.x, t.weight, None, *geometry)),
        "input_grad": (operators.input_grad, (t.grad, t.weight, tuple(t.x.shape), *geometry)),
        "weight_grad": (
            operators.weight_grad,
            (t.grad, t.x, tuple(t.weight.shape), tuple(t.weight.stride()), *geometry),
        ),
    }
    return list(found.values()) if direction == "train" else [found[direction]]


def torchs(case: Case, direction: str, t: Operands, *, compile: bool = False, graphs: bool = True) -> Run:
    """PyTorch's way, with ``compile`` through ``torch.compile(mode="max-autotune")``."""

    def ready(function: Callable) -> Callable:
        if not compile:
            return function
        return torch.compile(function, mode="max-autotune" if graphs else "max-autotune-no-cudagraphs")

    forward = ready(lambda x, weight: _torch_forward(case, x, weight))
    if direction == "forward":
        return lambda: forward(t.x, t.weight)
    if direction == "train":
        return _train(forward, t)
    backward = ready(lambda grad, x, weight: _torch_backward(case, direction, grad, x, weight))
    return lambda: backward(t.grad, t.x, t.weight)


def _train(forward: Callable[[Tensor, Tensor], Tensor], t: Operands) -> Run:
    x, weight = t.x.detach().requires_grad_(), t.weight.detach().requires_grad_()

    def step() -> tuple[Tensor | None, Tensor | None]:
        x.grad = weight.grad = None
        forward(x, weight).backward(t.grad)
        return x.grad, weight.grad

    return step


def _torch_forward(case: Case, x: Tensor, weight: Tensor) -> Tensor:
    """``F.conv2d``; where the padding is one-sided, which it has not, padded on both sides and cut, as users do."""
    padding, cut = _symmetric(case)
    y = F.conv2d(x, weight, None, case.stride, padding, case.dilation, case.c)
    return y if cut is None else y[:, :, cut[0], cut[1]]


def _torch_backward(case: Case, direction: str, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    padding, cut = _symmetric(case)
    if cut is not None:
        left, right, top, bottom = case.pads
        grad = F.pad(grad, (padding[1] - left, padding[1] - right, padding[0] - top, padding[0] - bottom))
    mask = [direction == "input_grad", direction == "weight_grad", False]
    stride, dilation = [case.stride] * 2, [case.dilation] * 2
    results = torch.ops.aten.convolution_backward(
        grad, x, weight, [0], stride, list(padding), dilation, False, [0, 0], case.c, mask
    )
    return results[0] if mask[0] else results[1]


def _symmetric(case: Case) -> tuple[tuple[int, int], tuple[slice, slice] | None]:
    """The least two-sided padding (vertical, horizontal) that covers the case's, and the cut that undoes the excess."""
    left, right, top, bottom = case.pads
    vertical, horizontal = max(top, bottom), max(left, right)
    if left == right and top == bottom:
        return (vertical, horizontal), None
    _, _, height, width = case.output_shape
    rows = slice(vertical - top, vertical - top + height)
    return (vertical, horizontal), (rows, slice(horizontal - left, horizontal - left + width))


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    empty = torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)
    return empty.uniform_(-1, 1)
