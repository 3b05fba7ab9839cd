"""Depthwise convolution against its definition, above all where other libraries have been wrong.

Where a docstring names an address, somebody reported there the fault that the test guards against.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import LAYOUTS, assert_as_accurate, check_convolution, geometry, hidden, poison
from torch import Tensor

from flashdwc import depthwise_conv1d, depthwise_conv2d, depthwise_conv3d, depthwise_conv_transpose2d
from flashdwc.kernels import reference


def randn(*size: int, **place) -> Tensor:
    return torch.randn(size, dtype=torch.float64).to(**place)


# --- memory layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_weight", [False, True])
@pytest.mark.parametrize("of_input", LAYOUTS)
@pytest.mark.parametrize("of_gradient", LAYOUTS)
def test_any_strides(of_input, of_gradient, of_weight, place):
    """Strided weights, inputs and gradients were read as if packed. https://github.com/pytorch/pytorch/issues/1246"""
    x, g = LAYOUTS[of_input](randn(2, 6, 9, 7, **place)), LAYOUTS[of_gradient](randn(2, 6, 9, 7, **place))
    w = LAYOUTS[of_input if of_weight else "contiguous"](randn(6, 1, 3, 3, **place))
    check_convolution(x, w, None, g, padding=1)


@pytest.mark.parametrize("pick", ["every second tap", "tap major", "every second filter", "one filter for all"])
def test_weight_cut_out_of_a_larger_tensor(pick, place):
    """https://github.com/pytorch/pytorch/issues/7805, https://github.com/pytorch/pytorch/issues/55781"""
    w = {
        "every second tap": randn(6, 1, 6, 6, **place)[:, :, ::2, ::2],
        "tap major": randn(3, 3, 1, 6, **place).permute(3, 2, 0, 1),
        "every second filter": randn(12, 1, 3, 3, **place)[::2],
        "one filter for all": randn(1, 1, 3, 3, **place).expand(6, 1, 3, 3),
    }[pick]
    for x in (randn(2, 6, 9, 7, **place), randn(1, 1, 9, 7, **place).expand(2, 6, 9, 7)):
        check_convolution(x, w, padding=1)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("size", [(4, 8, 1, 1), (4, 1, 5, 7), (4, 8, 1, 7), (1, 1, 1, 1), (2, 8, 5, 1)])
def test_strides_of_dimensions_of_size_one_mean_nothing(size, odd, place):
    """Layouts were told apart by them. https://github.com/pytorch/pytorch/issues/24090"""
    x = randn(*size, **place).to(memory_format=torch.channels_last)
    if odd:
        x = x.as_strided(size, [s if n > 1 else 977 for s, n in zip(x.stride(), size)])
    check_convolution(x, randn(size[1], 1, 3, 3, **place), padding=1)


def test_one_pixel_whose_stride_is_not_one(place):
    """The weight gradient of a single token took its neighbours. https://github.com/intel/torch-xpu-ops/issues/4906"""
    x = randn(2, 1, 4, **place).transpose(1, 2).unsqueeze(2)
    w = randn(4, 1, 1, 2, **place).requires_grad_()
    depthwise_conv2d(x, w, padding=(0, 1)).sum().backward()
    check_convolution(x, w, padding=(0, 1))
    only_padding = depthwise_conv2d(x, w[..., :1], padding=(0, 1))[..., 0]
    assert not only_padding.any()


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (1, 1, 1, 5), (2, 1, 1, 1)])
def test_expanded_incoming_gradient(size, place):
    """``sum().backward()`` hands over one number with strides of 0. https://github.com/pytorch/pytorch/issues/70992"""
    x, w = randn(2, 3, 6, 5, **place), randn(3, 1, 3, 3, **place)
    check_convolution(x, w, None, randn(*size, **place).expand(2, 3, 6, 5), padding=1)


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("channels", [1, 3, 5, 7, 12, 16])
def test_odd_addresses_between_not_a_numbers(channels, offset, place):
    """Wide loads faulted or took in what lies beside a tensor. https://github.com/Jim137/qkan/issues/26"""
    sizes = (2, channels, 5, 7), (channels, 1, 3, 3), (channels,), (2, channels, 5, 7)
    x, w, b, g = (hidden(randn(*size, **place), offset) for size in sizes)
    check_convolution(x, w, b, g, padding=1)


def test_distance_between_images_beyond_31_bits(place):
    """Offsets wrapped at 2^31 elements. https://github.com/fla-org/flash-linear-attention/issues/1080"""
    place = {**place, "dtype": torch.float16}
    memory = torch.empty(2**31 + 3 * 5 * 7, **place)  # 4 GiB of addresses; few pages are touched
    w = randn(3, 1, 3, 3, **place)
    far_images = memory.as_strided((2, 3, 5, 7), (2**31, 35, 7, 1)).copy_(randn(2, 3, 5, 7, **place))
    far_channels = memory[1:].as_strided((2, 3, 5, 7), (1, 2**29 - 11, 7, 1))
    check_convolution(far_images, w, padding=1)
    check_convolution(far_channels.copy_(randn(2, 3, 5, 7, **place)), w, padding=1)


@pytest.mark.parametrize("size", [(2, 4, 9, 8), (2, 1, 9, 8), (2, 4, 1, 1), (1, 4, 1, 8)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_format_is_pytorchs(size, memory_format, place):
    """https://github.com/pytorch/pytorch/issues/171622"""
    x = randn(*size, **place).to(memory_format=memory_format).requires_grad_()
    w = randn(size[1], 1, 3, 3, **place).requires_grad_()
    ours, theirs = depthwise_conv2d(x, w, padding=1), F.conv2d(x, w, padding=1, groups=size[1])
    shared = [d for d, n in enumerate(size) if n > 1]
    assert [ours.stride(d) for d in shared] == [theirs.stride(d) for d in shared]
    dx, _ = torch.autograd.grad(ours, (x, w), torch.randn_like(ours))
    assert [dx.stride(d) for d in shared] == [x.stride(d) for d in shared]


@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("of_weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_input", [torch.contiguous_format, torch.channels_last])
def test_gradient_has_the_strides_of_its_parameter(of_input, of_weight, kernel, place):
    """To the letter, or data-parallel training copies each bucket. https://github.com/BGU-CS-VIL/WTConv/issues/36"""
    w = randn(16, 1, kernel, kernel, **place).to(memory_format=of_weight).requires_grad_()
    x = randn(2, 16, 9, 9, **place).to(memory_format=of_input)
    depthwise_conv2d(x, w, padding=kernel // 2).sum().backward()
    assert w.grad.stride() == w.stride()


# --- geometry --------------------------------------------------------------------------------------------------------


def test_numbers_may_be_numpy_s():
    x, w, two = torch.randn(1, 4, 9, 9), torch.randn(4, 1, 3, 3), np.int64(2)
    expected = F.conv2d(x, w, None, 2, 2, 2, 4)
    torch.testing.assert_close(depthwise_conv2d(x, w, None, two, two, (two, 2)), expected)


def test_transposed_convolution_of_which_output_padding_alone_is_left():
    x, w, b = (torch.randn(size, requires_grad=True) for size in ((1, 2, 1, 3), (2, 1, 1, 1), (2,)))
    arguments = (x, w, b, (2, 1), (2, 0), (4, 0))
    ours = depthwise_conv_transpose2d(*arguments, (5, 1))
    theirs = F.conv_transpose2d(*arguments, 2, (5, 1))
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.autograd.grad(y.sum(), (x, w, b)) for y in (ours, theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("multiplier", [1, 2])
def test_memory_format_of_the_transposed_convolution(multiplier):
    x = torch.randn(2, 4, 7, 8).to(memory_format=torch.channels_last)
    w = torch.randn(4, multiplier, 3, 3)
    ours, theirs = depthwise_conv_transpose2d(x, w, None, 2, 1), F.conv_transpose2d(x, w, None, 2, 1, groups=4)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation"),
    [
        ((2, 3, 11, 6), (3, 5), (2, 1), (0, 2), (1, 2)),
        ((1, 4, 1, 32), (1, 3), 1, (0, 1), 1),
        ((2, 3, 32, 1), (3, 1), 1, (1, 0), 1),
        ((1, 2, 5, 40), (5, 1), (1, 3), (2, 0), 1),
        ((1, 2, 7, 7), (1, 7), (3, 1), (1, 3), (2, 1)),
        ((1, 16, 12, 20), (5, 3), (1, 2), (2, 1, 0, 3), (2, 1)),
    ],
)
def test_height_is_not_width(size, kernel, stride, padding, dilation, place):
    """Square tests cannot see them mixed up. https://github.com/torch/cunn/pull/470"""
    x, w = randn(*size, **place), randn(size[1], 1, *kernel, **place)
    check_convolution(x, w, stride=stride, padding=padding, dilation=dilation)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [
        ((9, 8), (3, 3), 2, 1),
        ((10, 7), (3, 3), 2, 0),
        ((11, 11), (1, 1), 2, 0),
        ((9, 10), (2, 2), 3, 0),
        ((8, 8), (3, 3), 5, 1),
        ((7, 12), (1, 3), (3, 4), (0, 1)),
    ],
)
def test_strides_also_beyond_the_kernel(size, kernel, stride, padding, place):
    """Rows that no window reaches have gradient 0. https://github.com/yonghenglh6/DepthwiseConvolution/issues/20"""
    x, w = randn(2, 4, *size, **place).requires_grad_(), randn(4, 1, *kernel, **place)
    check_convolution(x, w, stride=stride, padding=padding)
    poison(x.shape, like=x)
    depthwise_conv2d(x, w, None, stride, padding).sum().backward()
    reached = reached_by_a_window(x, w, stride, padding)
    assert not x.grad[~reached.to(x.device)].any()


def reached_by_a_window(x: Tensor, w: Tensor, stride, padding) -> Tensor:
    ones, taps = torch.ones(x.shape, dtype=torch.float64, requires_grad=True), torch.ones(w.shape, dtype=torch.float64)
    y = reference.depthwise_conv(ones * 1, taps, None, *geometry(x, w, stride, padding))
    return torch.autograd.grad(y.sum(), ones)[0] > 0


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [(2, 2), (4, 4), (2, 3), (5, 4), (1, 1)])
def test_same_padding_of_even_kernels(kernel, dilation, place):
    """The extra pixel goes to the end, as PyTorch has it. https://github.com/FluxML/Flux.jl/issues/1605"""
    x, w = randn(2, 3, 9, 8, **place), randn(3, 1, *kernel, **place)
    assert check_convolution(x, w, padding="same", dilation=dilation).shape == x.shape


def test_too_small_an_input_is_refused_whatever_the_stride(place):
    """A division that rounded to 0 let it through. https://github.com/pytorch/pytorch/issues/9592"""
    for n, k, s, p, d in product(range(1, 7), (1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2)):
        x, w = randn(1, 2, n, 6, **place), randn(2, 1, k, 1, **place)
        if place["device"] == "cuda" and (k, s) not in ((3, 2), (5, 1)):
            continue  # each is a kernel to compile
        if n + 2 * p >= d * (k - 1) + 1:
            check_convolution(x, w, stride=(s, 1), padding=(p, 0), dilation=(d, 1))
        else:
            with pytest.raises(ValueError, match=rf"{d * (k - 1) + 1} .*{n + 2 * p}"):
                depthwise_conv2d(x, w, None, (s, 1), (p, 0), (d, 1))


@pytest.mark.parametrize(("channels", "multiplier"), [(2, 16), (3, 2), (1, 8), (5, 3), (16, 2)])
def test_channel_multiplier(channels, multiplier, place):
    """All but the first output of a group were left unwritten. https://github.com/pytorch/pytorch/pull/60460"""
    x, w = randn(2, channels, 8, 9, **place), randn(channels * multiplier, 1, 3, 3, **place)
    check_convolution(x, w, randn(channels * multiplier, **place), padding=1)


@pytest.mark.parametrize(("height", "width"), [(31, 31), (51, 5), (5, 51), (1, 11), (63, 63), (13, 13), (2, 8)])
def test_large_kernels_and_strips(height, width, place):
    x, w = randn(1, 8, 20, 18, **place), randn(8, 1, height, width, **place)
    check_convolution(x, w, randn(8, **place), padding=(height // 2, width // 2))


@pytest.mark.parametrize(("mode", "padding"), product(("reflect", "replicate", "circular"), ((0, 1), (2, 0), (1, 3))))
def test_padding_modes_pad_the_right_axis(mode, padding, place):
    """https://github.com/pytorch/pytorch/issues/37844"""
    x, w, b = randn(1, 6, 20, 10, **place), randn(6, 1, 3, 3, **place), randn(6, **place)
    (x_, w_, b_), (padded, w__, b__) = [
        [t.detach().clone().requires_grad_() for t in group] for group in ((x, w, b), (x, w, b))
    ]
    y = depthwise_conv2d(x_, w_, b_, padding=padding, padding_mode=mode)
    vertical, horizontal = padding
    theirs = depthwise_conv2d(F.pad(padded, (horizontal, horizontal, vertical, vertical), mode), w__, b__)
    assert torch.equal(y, theirs)
    g = torch.randn_like(y)
    ours, theirs = torch.autograd.grad(y, (x_, w_, b_), g), torch.autograd.grad(theirs, (padded, w__, b__), g)
    # on CUDA, F.pad's own backward adds in any order, in the type of its operands: a few roundings apart
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=4 * eps * g.abs().max().item())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_unbatched_is_a_batch_of_one(mode, place):
    """Unbatched input was padded along the channels. https://github.com/pytorch/pytorch/issues/152152"""
    functions = {1: depthwise_conv1d, 2: depthwise_conv2d, 3: depthwise_conv3d}
    for n, function in functions.items():
        x, w = randn(4, *(9, 7, 8)[:n], **place), randn(8, 1, *(3,) * n, **place)
        y = function(x, w, padding=2, padding_mode=mode)
        assert y.shape == (8, *(11, 9, 10)[:n])
        assert torch.equal(y, function(x[None], w, padding=2, padding_mode=mode)[0])


@pytest.mark.parametrize("size", [(2, 6, 33), (1, 3, 8), (0, 4, 9)])
def test_one_dimension(size, place):
    x, w = randn(*size, **place), randn(2 * size[1], 1, 4, **place)
    check_convolution(x, w, randn(2 * size[1], **place), stride=2, padding=3, dilation=2)
    causal = depthwise_conv1d(x, w, stride=2, dilation=2, causal=True)
    assert torch.equal(causal, depthwise_conv1d(F.pad(x, (6, 0)), w, stride=2, dilation=2))


def test_a_sequence_has_the_strides_that_pytorch_gives_it(place):
    """Strides of ``[N, L, C].transpose(1, 2)`` look like channels_last, which F.conv1d does not follow."""
    x, w = randn(2, 10, 8, **place).transpose(1, 2), randn(8, 1, 3, **place)
    expected = F.conv1d(x, w, padding=1, groups=8).stride()
    assert depthwise_conv1d(x, w, padding=1).stride() == expected
    assert depthwise_conv1d(x, w, causal=True).stride() == expected
    assert depthwise_conv1d(x[0], w, causal=True).stride() == expected[1:]


@pytest.mark.parametrize("kernel", [3, 13])
def test_bias_of_any_strides(kernel, place):
    """oneDNN read a bias as if it were dense, beyond its end."""
    x, w = randn(1, 8, 15, 15, **place), randn(8, 1, kernel, kernel, **place)
    for b in (randn(16, **place)[::2], randn(1, **place).expand(8)):
        assert torch.equal(depthwise_conv2d(x, w, b), depthwise_conv2d(x, w, b.contiguous()))
        check_convolution(x, w, b)


@pytest.mark.parametrize("stride", [1, 2])
def test_taps_that_meet_padding_only(stride):
    """They cost time and memory as the square of the dilation."""
    x, w, far = torch.randn(2, 3, 6, 7).requires_grad_(), torch.randn(3, 1, 3, 3).requires_grad_(), 30_000
    ours = depthwise_conv2d(x, w, None, stride, far, far)
    theirs = F.conv2d(x, w, None, stride, far, far, groups=3)
    torch.testing.assert_close(ours, theirs)
    for dx_or_dw, expected in zip(*(torch.autograd.grad(y.sum(), (x, w)) for y in (ours, theirs))):
        torch.testing.assert_close(dx_or_dw, expected)


def test_causal_sees_nothing_of_the_future(place):
    x, w = randn(2, 4, 16, **place), randn(4, 1, 5, **place)
    y = depthwise_conv1d(x, w, causal=True)
    x[..., 9:] = torch.nan
    later = depthwise_conv1d(x, w, causal=True)
    assert torch.equal(later[..., :9], y[..., :9])
    assert later[..., 9:].isnan().all()


def test_three_dimensions(place):
    x, w = randn(2, 3, 5, 6, 7, **place), randn(6, 1, 3, 2, 4, **place)
    check_convolution(x, w, randn(6, **place), stride=(1, 2, 1), padding=(1, 0, 2), dilation=(2, 1, 1))


@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "dilation"),
    [(1, 0, 0, 1), (2, 1, 1, 1), ((3, 2), (1, 0), (2, 1), (1, 2)), (2, 0, 1, 3), (1, (2, 1), (1, 0), 2)],
)
@pytest.mark.parametrize("multiplier", [1, 3])
def test_transposed(stride, padding, output_padding, dilation, multiplier, place):
    tensors = [randn(2, 4, 5, 6, **place), randn(4, multiplier, 3, 4, **place), randn(4 * multiplier, **place)]
    arguments = (stride, padding, output_padding)

    def run(function, tensors, *last):
        tensors = [t.detach().requires_grad_() for t in tensors]
        y = function(*tensors, *arguments, *last)
        torch.manual_seed(0)
        return [y, *torch.autograd.grad(y, tensors, torch.randn(y.shape, dtype=torch.float64).to(y))]

    oracle = run(F.conv_transpose2d, [t.double().cpu() for t in tensors], 4, dilation)
    ours = run(depthwise_conv_transpose2d, tensors, dilation)
    theirs = run(F.conv_transpose2d, tensors, 4, dilation)
    for values in zip(ours, theirs, oracle):
        assert_as_accurate(*values)


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_empty_batch(place):
    """Gradients were None, or the kernel was launched on an empty grid. https://github.com/pytorch/pytorch/issues/19599"""
    x, w, b = randn(0, 3, 8, 9, **place), randn(6, 1, 3, 3, **place), randn(6, **place)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    y = depthwise_conv2d(x, w, b, 2, 1)
    assert y.shape == (0, 6, 4, 5)
    y.sum().backward()
    assert x.grad.shape == x.shape
    for t in (w, b):
        assert t.grad.shape == t.shape
        assert not t.grad.any()


@pytest.mark.parametrize(
    "size", [(65537, 1, 3, 3), (1, 65540, 3, 3), (1, 1, 140001, 2), (1, 1, 2, 140001), (257, 257, 2, 2)]
)
def test_far_end_of_each_long_axis(size, place):
    """A grid stops at 65535 blocks along y and z. https://github.com/SandAI-org/MagiAttention/pull/40"""
    check_convolution(randn(*size, **place), randn(size[1], 1, 3, 3, **place), padding=1)


@pytest.mark.parametrize(
    ("size", "kernel", "padding"), [((1, 3, 1, 1), (2, 2), 1), ((2, 3, 4, 1), (3, 2), (0, 1)), ((3, 1, 1), (2, 2), 1)]
)
def test_transposed_convolution_of_no_pixels(size, kernel, padding):
    """As PyTorch's: a crop may leave nothing."""
    x, w, b = (torch.randn(n, requires_grad=True) for n in (size, (3, 2, *kernel), (6,)))
    y, expected = (
        f(x, w, b, padding=padding, **groups)
        for f, groups in ((depthwise_conv_transpose2d, {}), (F.conv_transpose2d, {"groups": 3}))
    )
    assert y.shape == expected.shape and y.numel() == 0
    for gradient in torch.autograd.grad(y.sum(), (x, w, b)):
        assert not gradient.any()
