"""Depthwise convolution of every shape against its definition: hypothesis looks for the shape that breaks it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LAYOUTS, check_convolution
from torch import Tensor

from flashdwc import depthwise_conv1d, depthwise_conv2d, depthwise_conv_transpose2d
from flashdwc.kernels import reference

CPU_DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@dataclass
class Case:
    """Everything but the values; ``repr`` is what hypothesis prints."""

    images: int
    channels: int
    multiplier: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # (left, right, top, bottom) of two dimensions, else one for both sides of each
    dilation: tuple[int, ...]
    layouts: tuple[str, str, str]  # input, weight, gradient
    bias: bool
    seed: int

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64)

    def tensors(self, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        torch.manual_seed(self.seed)
        outputs = self.channels * self.multiplier
        x = self.random(self.images, self.channels, *self.size)
        w = self.random(outputs, 1, *self.kernel)
        low, high = self.pairs()
        pairs = [p for pair in zip(low, high) for p in pair]
        g = self.random(
            self.images,
            outputs,
            *reference.conv_output_size(self.size, self.kernel, self.stride, pairs, self.dilation),
        )
        b = self.random(outputs) if self.bias else None
        x, w, g = (LAYOUTS[name](t.to(device, dtype)) for name, t in zip(self.layouts, (x, w, g)))
        return x, w, None if b is None else b.to(device, dtype), g

    def pairs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if len(self.padding) == 4:
            left, right, top, bottom = self.padding
            return (top, left), (bottom, right)
        return self.padding, self.padding

    def check(self, device: str, dtype: torch.dtype, impl: str = "auto") -> None:
        x, w, b, g = self.tensors(device, dtype)
        check_convolution(x, w, b, g, stride=self.stride, padding=self.padding, dilation=self.dilation, impl=impl)


@st.composite
def cases(draw: st.DrawFn, rank: int = 2, largest: int = 12, kernel: int = 6, channels: int = 9) -> Case:
    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    kernels, dilation, stride = each(1, kernel), each(1, 3), each(1, 3)
    low = each(0, kernel)
    high = each(0, kernel) if rank == 2 else low
    smallest = [max(1, d * (k - 1) + 1 - a - b) for k, d, a, b in zip(kernels, dilation, low, high)]
    return Case(
        images=draw(st.integers(0, 3)),
        channels=draw(st.integers(1, channels)),
        multiplier=draw(st.integers(1, 3)),
        size=tuple(draw(st.integers(n, n + largest)) for n in smallest),
        kernel=kernels,
        stride=stride,
        padding=(low[1], high[1], low[0], high[0]) if rank == 2 else low,
        dilation=dilation,
        layouts=tuple(draw(st.sampled_from(list(LAYOUTS))) for _ in range(3)),  # type: ignore[arg-type]
        bias=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=300)
@given(cases(), CPU_DTYPES)
def test_two_dimensions(case, dtype):
    case.check("cpu", dtype)


@settings(max_examples=60)
@given(cases(largest=30, kernel=20, channels=20), CPU_DTYPES)
def test_large_kernels(case, dtype):
    case.check("cpu", dtype)


@settings(max_examples=60)
@given(cases(), CPU_DTYPES)
def test_pytorchs_kernels_as_a_backend(case, dtype):
    if dtype.itemsize > 2:  # PyTorch rounds the shorter types more than once
        case.check("cpu", dtype, impl="torch")


@settings(max_examples=60)
@given(cases(rank=1), CPU_DTYPES)
def test_one_dimension(case, dtype):
    case.check("cpu", dtype)


@settings(max_examples=60)
@given(cases(rank=3, largest=5, kernel=3, channels=4), CPU_DTYPES)
def test_three_dimensions(case, dtype):
    case.check("cpu", dtype)


@settings(max_examples=60)
@given(cases(), st.sampled_from(["reflect", "replicate", "circular"]))
def test_padding_modes(case, mode):
    case.images = max(1, case.images)  # PyTorch's F.pad refuses empty batches here
    x, w, b, _ = case.tensors("cpu", torch.float64)
    low, high = case.pairs()
    limit = {"reflect": -1, "circular": 0}.get(mode)
    fits = limit is None or all(max(pair) <= n + limit for *pair, n in zip(low, high, case.size))
    arguments = (w, b, case.stride, case.padding, case.dilation)
    if not fits:
        with pytest.raises(ValueError, match="padding"):
            depthwise_conv2d(x, *arguments, padding_mode=mode)
        return
    leaf, padded = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = depthwise_conv2d(leaf, *arguments, padding_mode=mode)
    wide = F.pad(padded, case.padding, mode)
    expected = reference.depthwise_conv(wide, w, b, case.stride, (0, 0, 0, 0), case.dilation)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, leaf, g), torch.autograd.grad(expected, padded, g))


@settings(max_examples=60)
@given(cases(rank=1))
def test_causal_is_padding_on_the_left(case):
    x, w, b, _ = case.tensors("cpu", torch.float64)
    (stride,), (dilation,) = case.stride, case.dilation
    y = depthwise_conv1d(x, w, b, stride, 0, dilation, causal=True)
    padded = F.pad(x, (dilation * (case.kernel[0] - 1), 0))
    torch.testing.assert_close(y, reference.depthwise_conv(padded, w, b, (stride,), (0, 0), (dilation,)))


@settings(max_examples=100)
@given(cases(), st.data())
def test_transposed(case, data):
    torch.manual_seed(case.seed)
    x = LAYOUTS[case.layouts[0]](case.random(case.images, case.channels, *case.size))
    w = case.random(case.channels, case.multiplier, *case.kernel)
    padding = case.padding[:2]
    extra = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(case.stride, case.dilation))
    size = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(case.size, case.stride, padding, case.dilation, case.kernel, extra)
    ]
    arguments = (x, w, None, case.stride, padding, extra)
    if min(size) < 0:
        with pytest.raises(ValueError, match="output size"):
            depthwise_conv_transpose2d(*arguments, case.dilation)
        return
    y = depthwise_conv_transpose2d(*arguments, case.dilation)
    if min(size) == 0:  # of which PyTorch refuses some
        assert y.shape == (case.images, case.channels * case.multiplier, *size)
        return
    torch.testing.assert_close(y, F.conv_transpose2d(*arguments, case.channels, case.dilation), check_stride=False)


# Each shape is a kernel to compile, so there are fewer of them.
CUDA_DTYPES = st.sampled_from([torch.float16, torch.bfloat16])


@pytest.mark.gpu
@settings(max_examples=60)
@given(cases(largest=30, channels=40), CUDA_DTYPES)
def test_cuda_kernels(case, dtype):
    case.check("cuda", dtype, impl="cuda")


@pytest.mark.gpu
@settings(max_examples=25)
@given(cases(largest=40, kernel=33, channels=20), CUDA_DTYPES)
def test_cuda_kernels_large(case, dtype):
    case.dilation = (1, 1)  # dilated, most are too large for shared memory
    low, high = case.pairs()
    case.size = tuple(max(n, k - a - b) for n, k, a, b in zip(case.size, case.kernel, low, high))
    case.check("cuda", dtype, impl="cuda")


@pytest.mark.gpu
@settings(max_examples=40)
@given(cases(), st.sampled_from([torch.float32, torch.float64]))
def test_cuda_wide_types(case, dtype):
    case.check("cuda", dtype)
