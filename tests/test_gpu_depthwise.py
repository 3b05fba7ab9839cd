"""The CUDA kernels: values in fresh memory that holds NaN, sizes beyond 2^31, determinism, speed."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from support import (
    LAYOUTS,
    assert_as_accurate,
    assert_rounded,
    check_convolution,
    check_non_finite_values,
    geometry,
    milliseconds,
    poison,
)
from torch import Tensor

import flashdwc
from flashdwc import depthwise_conv2d
from flashdwc.kernels import reference

pytestmark = pytest.mark.gpu

each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
each_layout = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])

# Input size, kernel, then stride, padding (also left, right, top, bottom), dilation, channel multiplier.
SHAPES = {
    "3x3": ((4, 64, 28, 28), (3, 3), 1, 1, 1, 1),
    "3x3 stride 2": ((4, 96, 29, 28), (3, 3), 2, 1, 1, 1),
    "3x3 stride 3": ((2, 32, 31, 30), (3, 3), 3, 1, 1, 1),
    "3x3 odd channels, odd width": ((3, 37, 20, 21), (3, 3), 1, 1, 1, 1),
    "3x3 one channel": ((5, 1, 19, 23), (3, 3), 1, 1, 1, 1),
    "3x3 one pixel": ((8, 64, 1, 1), (3, 3), 1, 1, 1, 1),
    "3x3 one column": ((2, 24, 33, 1), (3, 3), 1, 1, 1, 1),
    "3x3 dilation 2": ((2, 24, 20, 20), (3, 3), 1, 2, 2, 1),
    "3x3 uneven padding": ((2, 16, 12, 13), (3, 3), 2, (2, 0, 1, 3), 1, 1),
    "3x3 multiplier": ((2, 12, 14, 14), (3, 3), 1, 1, 1, 3),
    "1x1": ((2, 32, 14, 14), (1, 1), 1, 0, 1, 1),
    "2x2 stride 2": ((2, 32, 14, 14), (2, 2), 2, 0, 1, 1),
    "5x5": ((4, 240, 14, 14), (5, 5), 1, 2, 1, 1),
    "5x5 stride 2": ((4, 72, 28, 28), (5, 5), 2, 2, 1, 1),
    "7x7": ((8, 96, 56, 56), (7, 7), 1, 3, 1, 1),
    "7x7 small map": ((9, 100, 7, 7), (7, 7), 1, 3, 1, 1),
    "7x7 stride 2": ((2, 64, 56, 55), (7, 7), 2, 3, 1, 1),
    "7x7 stride 4": ((2, 16, 56, 56), (7, 7), 4, 3, 1, 1),
    "7x7 dilation 3": ((2, 40, 30, 30), (7, 7), 1, 9, 3, 1),
    "7x7 wide": ((1, 8, 9, 300), (7, 7), 1, 3, 1, 1),
    "7x7 multiplier": ((2, 8, 28, 28), (7, 7), 1, 3, 1, 4),
    "9x9": ((4, 64, 64, 64), (9, 9), 1, 4, 1, 1),
    "13x13": ((4, 64, 32, 32), (13, 13), 1, 6, 1, 1),
    "13x13 stride 2": ((2, 32, 28, 28), (13, 13), 2, 6, 1, 1),
    "17x17 larger than the map": ((3, 24, 10, 9), (17, 17), 1, 8, 1, 1),
    "31x31": ((4, 64, 32, 32), (31, 31), 1, 15, 1, 1),
    "31x31 odd": ((2, 19, 27, 25), (31, 31), 1, 15, 1, 1),
    "51x5": ((2, 48, 28, 28), (51, 5), 1, (2, 2, 25, 25), 1, 1),
    "51x5 odd channels": ((2, 37, 30, 28), (51, 5), 1, (2, 2, 25, 25), 1, 1),
    "21x7 stride 2, uneven padding": ((2, 24, 40, 33), (21, 7), 2, (1, 5, 8, 11), 1, 1),
    "15x3 dilation 2, multiplier": ((2, 16, 40, 20), (15, 3), 1, (2, 2, 14, 14), 2, 2),
    "5x51": ((2, 48, 28, 28), (5, 51), 1, (25, 25, 2, 2), 1, 1),
    "1x11": ((2, 40, 28, 28), (1, 11), 1, (5, 5, 0, 0), 1, 1),
    "11x1": ((2, 40, 28, 28), (11, 1), 1, (0, 0, 5, 5), 1, 1),
    "1x4 along a line": ((2, 64, 1, 1000), (1, 4), 1, (3, 0, 0, 0), 1, 1),
    "1x31 along a line": ((3, 24, 1, 1000), (1, 31), 1, (15, 15, 0, 0), 1, 1),
    "1x31 along a line, stride 2": ((2, 19, 1, 777), (1, 31), (1, 2), (15, 15, 0, 0), 1, 1),
    "1x30 along a line, dilation 3": ((2, 8, 1, 500), (1, 30), 1, (44, 43, 0, 0), 3, 2),
    "63x63": ((1, 16, 40, 40), (63, 63), 1, 31, 1, 1),
}


def cuda(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(size, device="cuda", dtype=dtype)


@each_dtype
@each_layout
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients(shape, layout, dtype):
    (images, channels, *size), kernel, stride, padding, dilation, multiplier = SHAPES[shape]
    x = LAYOUTS[layout](cuda(images, channels, *size, dtype=dtype))
    w = cuda(channels * multiplier, 1, *kernel, dtype=dtype)
    b = cuda(channels * multiplier, dtype=dtype)
    arguments = {"stride": stride, "padding": padding, "dilation": dilation}
    y = check_convolution(x, w, b, **arguments, impl="cuda")
    g = LAYOUTS[layout](torch.randn_like(y))
    check_convolution(x, w, None, g, **arguments, impl="cuda")


# Images, channels, height, width, kernel, stride, padding (left, right, top, bottom), dilation.
SMALL_MAPS = {
    "3x3": ((5, 24, 14, 14), (3, 3), 1, (1, 1, 1, 1), 1),
    "3x3 of 28 columns": ((3, 10, 28, 28), (3, 3), 1, (1, 1, 1, 1), 1),
    "3x3 of 112 columns": ((2, 3, 20, 112), (3, 3), 1, (1, 1, 1, 1), 1),
    "3x3 of odd width": ((4, 16, 13, 13), (3, 3), 1, (1, 1, 1, 1), 1),
    "3x3 stride 2": ((7, 24, 14, 14), (3, 3), 2, (1, 1, 1, 1), 1),
    "3x3 stride 2 of 56 columns": ((3, 6, 16, 56), (3, 3), 2, (0, 1, 0, 1), 1),
    "3x3 dilation 2": ((5, 24, 14, 14), (3, 3), 1, (2, 2, 2, 2), 2),
    "5x5": ((300, 24, 7, 7), (5, 5), 1, (2, 2, 2, 2), 1),
    "5x5 stride 2": ((5, 20, 14, 14), (5, 5), 2, (2, 2, 2, 2), 1),
    "5x3 uneven padding": ((4, 16, 9, 12), (5, 3), 1, (0, 2, 4, 1), 1),
    "7x7": ((6, 40, 7, 7), (7, 7), 1, (3, 3, 3, 3), 1),
    "7x7 of 14 columns": ((6, 40, 14, 14), (7, 7), 1, (3, 3, 3, 3), 1),
}


@each_dtype
@pytest.mark.parametrize("shape", SMALL_MAPS)
def test_small_maps(shape, dtype, prefer):
    prefer("maps")
    size, kernel, stride, padding, dilation = SMALL_MAPS[shape]
    x, w, b = cuda(*size, dtype=dtype), cuda(size[1], 1, *kernel, dtype=dtype), cuda(size[1], dtype=dtype)
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "impl": "cuda"}
    assert "whole maps" in flashdwc.explain(depthwise_conv2d, x, w, b, **arguments).detail
    y = check_convolution(x, w, b, **arguments)
    check_convolution(x, w, None, torch.randn_like(y), **arguments)
    x[-1, 2, 1, 2], x[0, 1, -1, -1], w[1, 0, 0, -1] = torch.inf, torch.nan, -torch.inf
    y = depthwise_conv2d(x, w, b, **arguments)
    check_non_finite_values(x, w, b, y, *geometry(x, w, stride, padding, dilation))


# Layout, images, channels, height, width, kernel, stride, padding (left, right, top, bottom), dilation.
IN_STEPS = {
    "octets 3x3": ("channels_last", (3, 64, 33, 64), (3, 3), 1, (1, 1, 1, 1), 1),
    "octets 5x5 of some channels": ("channels_last", (2, 104, 30, 31), (5, 5), 1, (2, 2, 2, 2), 1),
    "octets 5x5 across strips": ("channels_last", (2, 192, 41, 150), (5, 5), 1, (2, 2, 2, 2), 1),
    "octets 7x7": ("channels_last", (3, 192, 56, 56), (7, 7), 1, (3, 3, 3, 3), 1),
    "octets 7x7 of 14 columns": ("channels_last", (9, 64, 14, 14), (7, 7), 1, (3, 3, 3, 3), 1),
    "octets 7x7 of 7 columns": ("channels_last", (33, 128, 7, 7), (7, 7), 1, (3, 3, 3, 3), 1),
    "octets 7x7 without padding": ("channels_last", (2, 64, 40, 48), (7, 7), 1, (0, 0, 0, 0), 1),
    "octets 7x5 uneven padding": ("channels_last", (3, 64, 20, 28), (7, 5), 1, (4, 0, 1, 6), 1),
    "octets 3x3 dilation 3": ("channels_last", (2, 64, 30, 40), (3, 3), 1, (3, 3, 3, 3), 3),
    "octets 9x9": ("channels_last", (2, 64, 64, 64), (9, 9), 1, (4, 4, 4, 4), 1),
    "octets 3x3 stride 2": ("channels_last", (3, 64, 57, 112), (3, 3), 2, (0, 1, 0, 1), 1),
    "octets 5x5 stride 2": ("channels_last", (7, 64, 28, 28), (5, 5), 2, (2, 2, 2, 2), 1),
    "transposed 3x3 of 64 channels": ("channels_last", (3, 64, 33, 64), (3, 3), 1, (1, 1, 1, 1), 1),
    "transposed 5x5 of 64 channels": ("channels_last", (2, 128, 30, 31), (5, 5), 1, (2, 2, 2, 2), 1),
    "transposed 3x3 of 64 channels, dilation 2": ("channels_last", (3, 64, 33, 64), (3, 3), 1, (2, 2, 2, 2), 2),
    "transposed 3x3 of 192 channels across strips": ("channels_last", (2, 192, 41, 150), (3, 3), 1, (1, 1, 1, 1), 1),
    "transposed 3x5 uneven padding": ("channels_last", (3, 64, 40, 48), (3, 5), 1, (0, 2, 3, 0), 1),
    "transposed 5x4 of few rows": ("channels_last", (9, 64, 6, 64), (5, 4), 1, (2, 2, 2, 1), 1),
    "transposed 5x5 of 72 channels": ("channels_last", (2, 72, 21, 70), (5, 5), 1, (2, 2, 2, 2), 1),
    "transposed 7x7": ("channels_last", (5, 96, 56, 56), (7, 7), 1, (3, 3, 3, 3), 1),
    "transposed 7x7 of some channels": ("channels_last", (2, 40, 29, 61), (7, 7), 1, (3, 3, 3, 3), 1),
    "transposed 7x7 in narrow strips": ("channels_last", (3, 64, 47, 30), (7, 7), 1, (3, 3, 3, 3), 1),
    "transposed 7x7 across strips": ("channels_last", (1, 32, 19, 200), (7, 7), 1, (3, 3, 3, 3), 1),
    "transposed 7x7 of few rows": ("channels_last", (4, 32, 9, 40), (7, 7), 1, (3, 3, 3, 3), 1),
    "transposed 7x7 without padding": ("channels_last", (2, 32, 40, 48), (7, 7), 1, (0, 0, 0, 0), 1),
    "transposed 7x7 uneven padding": ("channels_last", (2, 32, 40, 48), (7, 7), 1, (1, 4, 0, 6), 1),
    "transposed 7x7 dilation 2": ("channels_last", (2, 32, 40, 48), (7, 7), 1, (6, 6, 6, 6), 2),
    "transposed 2x7": ("channels_last", (2, 32, 40, 48), (2, 7), 1, (2, 4, 0, 1), 1),
    "transposed 9x9": ("channels_last", (2, 96, 64, 64), (9, 9), 1, (4, 4, 4, 4), 1),
    "transposed 13x13": ("channels_last", (2, 48, 50, 64), (13, 13), 1, (6, 6, 6, 6), 1),
    "transposed 17x17": ("channels_last", (2, 48, 50, 64), (17, 17), 1, (8, 8, 8, 8), 1),
    "transposed 31x31": ("channels_last", (2, 24, 50, 56), (31, 31), 1, (15, 15, 15, 15), 1),
    "transposed 31x31 in narrow strips": ("channels_last", (1, 24, 50, 30), (31, 31), 1, (15, 15, 15, 15), 1),
    "transposed 5x31": ("channels_last", (2, 24, 50, 56), (5, 31), 1, (15, 15, 2, 2), 1),
    "images 7x7 contiguous": ("contiguous", (35, 24, 7, 7), (7, 7), 1, (3, 3, 3, 3), 1),
    "images 27x27 contiguous": ("contiguous", (40, 16, 14, 14), (27, 27), 1, (13, 13, 13, 13), 1),
    "images 5x3 contiguous": ("contiguous", (9, 8, 11, 13), (5, 3), 1, (1, 2, 3, 0), 1),
    "images 7x7 in sets": ("channels_last", (128, 768, 7, 7), (7, 7), 1, (3, 3, 3, 3), 1),
    "images 7x7": ("channels_last", (33, 24, 7, 7), (7, 7), 1, (3, 3, 3, 3), 1),
    "images 13x13 of 14 columns": ("channels_last", (17, 16, 14, 14), (13, 13), 1, (6, 6, 6, 6), 1),
    "images 27x27": ("channels_last", (40, 16, 14, 14), (27, 27), 1, (13, 13, 13, 13), 1),
    "images 3x5 uneven padding": ("channels_last", (5, 16, 9, 16), (3, 5), 1, (1, 7, 2, 0), 2),
    "warps 5x5": ("contiguous", (3, 10, 41, 64), (5, 5), 1, (2, 2, 2, 2), 1),
    "warps 7x7": ("contiguous", (7, 9, 56, 56), (7, 7), 1, (3, 3, 3, 3), 1),
    "warps 7x7 of 28 columns": ("contiguous", (5, 9, 28, 28), (7, 7), 1, (3, 3, 3, 3), 1),
    "warps 7x7 of 14 columns": ("contiguous", (5, 9, 14, 14), (7, 7), 1, (3, 3, 3, 3), 1),
    "warps 7x7 across strips": ("contiguous", (2, 9, 19, 152), (7, 7), 1, (3, 3, 3, 3), 1),
    "warps 5x4 uneven padding": ("contiguous", (2, 4, 19, 28), (5, 4), 1, (1, 2, 0, 4), 1),
    "warps 5x5 dilation 3": ("contiguous", (2, 4, 40, 40), (5, 5), 1, (6, 6, 6, 6), 3),
    "warps 13x13": ("contiguous", (2, 20, 64, 64), (13, 13), 1, (6, 6, 6, 6), 1),
    "warps 31x31": ("contiguous", (2, 20, 64, 64), (31, 31), 1, (15, 15, 15, 15), 1),
    "warps 5x5 stride 2": ("contiguous", (5, 8, 56, 56), (5, 5), 2, (2, 2, 2, 2), 1),
}


@each_dtype
@pytest.mark.parametrize("shape", IN_STEPS)
def test_kernels_that_walk(shape, dtype, prefer):
    prefer(shape.partition(" ")[0])
    layout, size, kernel, stride, padding, dilation = IN_STEPS[shape]
    x, g_like = LAYOUTS[layout](cuda(*size, dtype=dtype)), LAYOUTS[layout]
    w, b = cuda(size[1], 1, *kernel, dtype=dtype), cuda(size[1], dtype=dtype)
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "impl": "cuda"}
    family = {
        "octets": "octets of channels",
        "images": "whole images at once",
        "transposed": "transposed",
        "warps": "each warp on its own",
    }
    assert family[shape.partition(" ")[0]] in flashdwc.explain(depthwise_conv2d, x, w, b, **arguments).detail
    y = check_convolution(x, w, b, **arguments)
    check_convolution(x, w, None, g_like(torch.randn_like(y)), **arguments)
    x[-1, 3, 1, 2], x[0, 2, -1, -1], w[1, 0, 0, -1] = torch.inf, torch.nan, -torch.inf
    y = depthwise_conv2d(x, w, b, **arguments)
    check_non_finite_values(x, w, b, y, *geometry(x, w, stride, padding, dilation))


@pytest.mark.usefixtures("many_writes")
@pytest.mark.parametrize("width", [7, 18])
def test_planes_that_exchange_outputs(width, prefer):
    prefer("planar")
    x, w = cuda(3, 33, 9, width + 2)[..., :width], cuda(33, 1, 3, 3)
    assert "of a plane" in flashdwc.explain(depthwise_conv2d, x, w, padding=1, impl="cuda").detail
    check_convolution(x, w, padding=1, impl="cuda")


@pytest.mark.parametrize("kernel", [*range(2, 10), *range(11, 64, 4)])
def test_square_kernels(kernel):
    x, w = LAYOUTS["channels_last"](cuda(2, 20, 24, 22)), cuda(20, 1, kernel, kernel)
    check_convolution(x, w, padding=kernel // 2, impl="cuda")


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_input", LAYOUTS)
@pytest.mark.parametrize("kernel", [3, 7])
def test_any_layout(kernel, of_input, of_gradient):
    x, g = LAYOUTS[of_input](cuda(2, 16, 12, 16)), LAYOUTS[of_gradient](cuda(2, 16, 12, 16))
    check_convolution(x, cuda(16, 1, kernel, kernel), cuda(16), g, padding=kernel // 2, impl="cuda")


@each_dtype
@pytest.mark.parametrize("kernel", [3, 7, 31])
def test_as_accurate_as_pytorch_on_a_real_layer(kernel, dtype):
    x, g = (LAYOUTS["channels_last"](cuda(32, 64, 56, 56, dtype=dtype)) for _ in range(2))
    w = cuda(64, 1, kernel, kernel, dtype=dtype) / kernel
    x, w = x.requires_grad_(), w.requires_grad_()
    geometry = ((1, 1), (kernel // 2,) * 4, (1, 1))
    ours, theirs = (
        depthwise_conv2d(x, w, padding=kernel // 2, impl="cuda"),
        F.conv2d(x, w, padding=kernel // 2, groups=64),
    )
    x_, w_, g_ = (t.detach().double() for t in (x, w, g))
    oracle = reference.depthwise_conv(x_, w_, None, *geometry)
    assert_as_accurate(ours, theirs, oracle.cpu())
    dx = reference.depthwise_conv_input_grad(g_, w_, x.shape, *geometry)
    dw = reference.depthwise_conv_weight_grad(g_, x_, w.shape, w.stride(), *geometry)
    gradients = [torch.autograd.grad(y, (x, w), g) for y in (ours, theirs)]
    for values in zip(*gradients, (dx.cpu(), dw.cpu())):
        assert_as_accurate(*values)


@pytest.mark.parametrize("kernel", [3, 13])
def test_every_finite_float16_survives(kernel):
    """Subnormals and the largest numbers: a tap of weight 1 copies them."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(torch.float16)
    values = values[values.isfinite()]
    values = values[: len(values) // 64 * 64].view(1, 8, -1, 8)
    w = torch.zeros(8, 1, kernel, kernel, device="cuda", dtype=torch.float16)
    w[:, :, kernel // 2, kernel // 2] = 1
    assert torch.equal(depthwise_conv2d(values, w, padding=kernel // 2, impl="cuda"), values)


def test_rounding_to_nearest_even():
    x = (
        torch.tensor([2048.0, 2050.0, 2051.0, 4096.0], device="cuda", dtype=torch.float16)
        .view(1, 1, 2, 2)
        .repeat(1, 8, 1, 1)
    )
    y = depthwise_conv2d(
        x, torch.ones(8, 1, 1, 1, device="cuda", dtype=torch.float16), torch.ones(8, device="cuda").half()
    )
    assert torch.equal(y, (x.double() + 1).half())


@pytest.mark.parametrize("precision", ["ieee", None])
@each_layout
def test_ieee_precision_is_kept_whatever_the_switches(layout, precision):
    x, w = LAYOUTS[layout](cuda(2, 16, 20, 20, dtype=torch.float32)), cuda(16, 1, 7, 7, dtype=torch.float32)
    with torch.backends.cudnn.flags(allow_tf32=precision == "ieee"):
        y = depthwise_conv2d(x, w, padding=3, precision=precision)
    geometry = ((1, 1), (3,) * 4, (1, 1))
    x, w = x.double(), w.double()
    magnitude = reference.depthwise_conv(x.abs(), w.abs(), None, *geometry)
    assert_rounded(y, reference.depthwise_conv(x, w, None, *geometry), magnitude, 49)


def test_largest_tile_of_the_widest_type():
    """A refused launch was only printed. https://github.com/OpenGVLab/InternImage/issues/257"""
    for dtype in (torch.float64, torch.float16):
        x, w = cuda(2, 4, 64, 64, dtype=dtype), cuda(4, 1, 63, 63, dtype=dtype)
        check_convolution(x, w, padding=31)
    assert torch.zeros(1, device="cuda").add_(1).item() == 1  # no error left behind


@each_layout
@pytest.mark.parametrize("kernel", [3, 7, 31])
def test_the_same_bits_in_every_run(kernel, layout):
    x = LAYOUTS[layout](cuda(16, 48, 56, 56)).requires_grad_()
    w, b = cuda(48, 1, kernel, kernel).requires_grad_(), cuda(48).requires_grad_()
    g, runs = torch.randn_like(x), []
    for _ in range(3):
        poison(x.shape, w.shape, like=x)
        y = depthwise_conv2d(x, w, b, padding=kernel // 2, impl="cuda")
        runs.append([y.detach(), *torch.autograd.grad(y, (x, w, b), g)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def memory_soon() -> int:
    """Allocated bytes, when the engine's thread had time to forget the last gradients."""
    time.sleep(0.02)
    return torch.cuda.memory_allocated()


def test_memory_stays_flat():
    x, w = cuda(4, 16, 28, 28).requires_grad_(), cuda(16, 1, 7, 7).requires_grad_()
    seen = []
    for _ in range(3):
        for _ in range(50):
            depthwise_conv2d(x, w, padding=3)
            torch.autograd.grad(depthwise_conv2d(x, w, padding=3).sum(), (x, w))
        seen.append(min(memory_soon() for _ in range(5)))
    assert seen[0] == seen[1] == seen[2]


# --- more than 2^31 elements -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("much_gpu_memory")
@pytest.mark.parametrize("kernel", [3, 7])
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        ((1, 2, 32800, 32800), "contiguous"),
        ((1, 2, 32800, 32800), "channels_last"),
        ((1, 514, 2048, 2048), "contiguous"),
        ((600, 64, 240, 240), "channels_last"),
    ],
)
def test_beyond_31_bits(size, layout, kernel):
    """Index arithmetic wrapped inside one image. https://github.com/pytorch/pytorch/issues/152816"""
    elements = size[0] * size[1] * size[2] * size[3]
    assert elements > 2**31
    if torch.cuda.mem_get_info()[0] < 14 * elements:
        pytest.skip("needs 30 GB of memory")
    memory_format = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}[layout]
    x = torch.empty(size, device="cuda", dtype=torch.float16, memory_format=memory_format).normal_(0, 0.1)
    w = cuda(size[1], 1, kernel, kernel).requires_grad_()
    x.requires_grad_()
    y = depthwise_conv2d(x, w, padding=kernel // 2, impl="cuda")
    geometry = ((1, 1), (kernel // 2,) * 4, (1, 1))
    last = x.detach()[-1:, -2:, -40:].double(), w.detach()[-2:].double()
    rows = slice(-30, None)
    expected = reference.depthwise_conv(*last, None, *geometry)[:, :, rows]
    magnitude = reference.depthwise_conv(*(t.abs() for t in last), None, *geometry)[:, :, rows]
    assert_rounded(y[-1:, -2:, rows], expected, magnitude, kernel**2)
    del expected, magnitude
    g = torch.ones((), device="cuda", dtype=torch.float16).expand(size)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    center = dw[:, 0, kernel // 2, kernel // 2].double()
    sums = x.detach().sum((0, 2, 3), dtype=torch.float64)
    assert ((center - sums).abs() <= 1e-2 * sums.abs() + 1e-7 * elements / size[1]).all()
    inner = dx[-1, -2:, -30:-20, 100:-100].double()
    total = w.detach()[-2:].double().sum((1, 2, 3)).view(2, 1, 1)
    assert (inner - total).abs().max() <= 1e-2 * w.detach().double().abs().sum((1, 2, 3)).max()


# --- speed -----------------------------------------------------------------------------------------------------------


def both(layer, x: Tensor, w: Tensor) -> None:
    torch.autograd.grad(layer(x, w).sum(), (x, w))


def test_half_is_as_fast_as_bfloat16_and_pytorch():
    """Half precision fell behind in some releases, on a fourth of this. https://github.com/pytorch/pytorch/issues/170138"""
    times = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = cuda(64, 768, 1, 1024, dtype=dtype).requires_grad_()
        w = cuda(768, 1, 1, 31, dtype=dtype).requires_grad_()
        times[dtype], theirs = milliseconds(
            lambda: both(lambda x, w: depthwise_conv2d(x, w, padding=(0, 15)), x, w),  # noqa: B023
            lambda: both(lambda x, w: F.conv2d(x, w, padding=(0, 15), groups=768), x, w),  # noqa: B023
        )
        assert times[dtype] <= 1.1 * theirs
    assert times[torch.float16] <= 1.2 * times[torch.bfloat16]


@each_dtype
def test_short_filters_over_many_channels_run_at_the_speed_of_memory(dtype):
    """https://github.com/pytorch/pytorch/issues/192902"""
    x, w = cuda(1, 12288, 1, 16384, dtype=dtype), cuda(12288, 1, 1, 4, dtype=dtype)
    copy = torch.empty_like(x)
    ours, copying = milliseconds(lambda: depthwise_conv2d(x, w), lambda: copy.copy_(x))
    assert ours <= 2 * copying


@pytest.mark.parametrize("channels", [96, 768])
def test_launches_do_not_depend_on_the_channels(channels):
    """Gradients launched one kernel for each channel. https://github.com/tracel-ai/burn/pull/5422"""
    x, w = cuda(2, channels, 14, 14).requires_grad_(), cuda(channels, 1, 7, 7).requires_grad_()
    y = depthwise_conv2d(x, w, padding=3, impl="cuda")
    g = torch.randn_like(y)
    torch.autograd.grad(y, (x, w), g, retain_graph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(y, (x, w), g)
        torch.cuda.synchronize()
    kernels = [e.key for e in profile.key_averages() for _ in range(e.count) if e.device_type.name == "CUDA"]
    assert 2 <= len(kernels) <= 4, kernels


def test_explain_names_tile_and_roofline():
    x, w = LAYOUTS["channels_last"](cuda(8, 96, 56, 56)), cuda(96, 1, 7, 7)
    explanation = flashdwc.explain(depthwise_conv2d, x, w, padding=3)
    assert explanation.chosen in ("cuda", "torch")
    assert 0 < explanation.floor_ms < 1
    assert dict(explanation.backends)["cpu"] == "the tensors are on cuda:0"
