"""Depthwise convolution on the CPU, built of PyTorch operators, in the formulations of ``depthwise_formulations.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..native import CHANNELS_LAST, CONVOLUTIONS, own, pad
from . import depthwise_weight_grad as weight_grads
from .depthwise_formulations import (
    Ints,
    choose_for_autograd,
    choose_forward,
    choose_input_grad,
    choose_weight_grad,
    fresh_strides,
    in_channels_last,
    in_format,
    narrowed,
    taps_of_forward,
    taps_of_input_grad,
    taps_of_weight_grad,
)

_PIECE_BYTES = 1 << 19  # of a piece that is copied
_PIXEL_CHANNELS = 32  # in such a piece, or a multiple


def forward(
    x: Tensor,  # [N, C, *spatial]
    w: Tensor,  # [C * m, 1, *kernel]
    b: Tensor | None,  # [C * m]
    stride: Ints,
    padding: Ints,  # (low, high) of each dimension
    dilation: Ints,
) -> Tensor:  # [N, C * m, *spatial], channels_last if x or w is
    """Depthwise convolution; taps on the padding take no part, whatever their weight."""
    return prepare_forward(x, w, stride, padding, dilation)(x, w, b)


def prepare_forward(
    x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """What :func:`forward` does with every ``x``, ``w`` and bias of these sizes, strides and types."""
    if (taps := taps_of_forward(x, w, stride, padding, dilation)) is not None:
        smaller = prepare_forward(x, taps.of(w), stride, taps.padding, dilation)
        return lambda x, w, b: smaller(x, taps.of(w), b)
    plan = choose_forward(x.dtype, x.shape, x.stride(), w.shape, w.stride(), stride, padding, dilation)
    convolution, low, groups = CONVOLUTIONS[len(stride)], padding[::2], x.shape[1]
    channels_last = in_channels_last(x, w)
    if plan == "direct":
        if _goes_to_onednn(
            x, w, stride, low, dilation, channels_last
        ):  # past the three functions that find that out again

            def past_them(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
                b = b if b is None or b.is_contiguous() else b.contiguous()  # oneDNN takes it for dense
                return torch.mkldnn_convolution(x, w, b, low, stride, dilation, groups)

            return past_them
        return lambda x, w, b: convolution(x, w, b, stride, low, dilation, groups)
    if plan == "pixel":
        return _plan_on_pixels(x, w, stride, low)
    if plan == "taps":
        return _plan_over_taps(x, w, stride, padding, dilation)
    if plan == "guarded":
        return _plan_guarded(x, w, stride, padding, dilation)
    return lambda x, w, b: own(in_format(_forward_by(plan, x, w, b, stride, padding, dilation), channels_last))


def prepare_forward_for_autograd(
    x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """:func:`prepare_forward` where autograd had better follow PyTorch's convolution: a function of Python in its graph would
    cost small layers a third of their time."""
    plan = choose_for_autograd(x, w, stride, padding, dilation)
    if w.stride() != fresh_strides(w.shape, False) or plan is None:
        return None
    if plan == "guarded":
        return _plan_guarded(x, w, stride, padding, dilation)
    run = prepare_forward(x, w, stride, padding, dilation)
    if not in_channels_last(x, w):
        return run
    return lambda x, w, b: run(x, w.view_as(w), b)  # its gradient then has the strides of w to the letter


def _goes_to_onednn(x: Tensor, w: Tensor, stride: Ints, low: Ints, dilation: Ints, channels_last: bool) -> bool:
    """Whether PyTorch's convolution would hand these operands to oneDNN as they are."""
    chosen = torch._C._select_conv_backend(
        x, w, None, stride, low, dilation, False, [0] * len(stride), x.shape[1], None
    )
    fmt = CHANNELS_LAST[x.dim()] if channels_last else torch.contiguous_format
    as_they_are = x.is_contiguous(memory_format=fmt) and w.is_contiguous(memory_format=fmt)
    return as_they_are and chosen == torch._C._ConvBackend.Mkldnn  # type: ignore[attr-defined]


def input_grad(
    dy: Tensor,  # [N, C * m, *spatial]
    w: Tensor,  # [C * m, 1, *kernel]
    input_size: Sequence[int],  # [N, C, *spatial]
    stride: Ints,
    padding: Ints,
    dilation: Ints,
) -> Tensor:  # input_size, channels_last if dy or w is
    """Gradient of :func:`forward` in ``x``; taps on the padding take no part either."""
    return prepare_input_grad(dy, w, input_size, stride, padding, dilation)(dy, w)


def prepare_input_grad(
    dy: Tensor, w: Tensor, input_size: Sequence[int], stride: Ints, padding: Ints, dilation: Ints
) -> Callable[[Tensor, Tensor], Tensor]:
    """What :func:`input_grad` does with every ``dy`` and ``w`` of these sizes, strides and types."""
    size, channels_last = tuple(input_size), in_channels_last(dy, w)
    if (taps := taps_of_input_grad(dy, w, size, stride, padding, dilation)) is not None:
        smaller = prepare_input_grad(dy, taps.of(w), size, stride, taps.padding, dilation)
        return lambda dy, w: smaller(dy, taps.of(w))
    strides = fresh_strides(size, channels_last)
    plan = choose_input_grad(dy.dtype, size, dy.shape, dy.stride(), w.shape, stride, padding, dilation)
    if plan == "torch":
        low, beyond, crop = _transposed_geometry(size, w.shape, stride, padding, dilation)
        transposed = F.conv_transpose2d if len(stride) == 2 else F.conv_transpose3d
        groups, cropped = size[1], any(crop)

        def as_it_is(dy: Tensor, w: Tensor) -> Tensor:
            dx = transposed(dy, w, None, stride, low, beyond, groups, dilation)
            dx = pad(dx, crop) if cropped else dx
            return dx if dx.stride() == strides and not cropped else own(in_format(dx, channels_last))

        return as_it_is
    if plan == "rotated":
        around = [d * (w.shape[2 + i // 2] - 1) - p for i, (d, p) in enumerate(zip(_twice(dilation), padding))]
        cut = [min(0, p) for p in around]
        axes, inside = tuple(range(2, w.dim())), not any(cut)
        example = dy if inside else pad(dy, cut)
        convolve = prepare_forward(example, w.flip(axes), stride, tuple(max(0, p) for p in around), dilation)

        def rotated(dy: Tensor, w: Tensor) -> Tensor:
            dx = convolve(dy if inside else pad(dy, cut), w.flip(axes), None)
            return dx if dx.stride() == strides else own(in_format(dx, channels_last))

        return rotated
    return lambda dy, w: own(in_format(_input_grad_by(plan, dy, w, size, stride, padding, dilation), channels_last))


def weight_grad(
    dy: Tensor,  # [N, C * m, *spatial]
    x: Tensor,  # [N, C, *spatial]
    weight_size: Sequence[int],  # [C * m, 1, *kernel]
    stride: Ints,
    padding: Ints,
    dilation: Ints,
) -> Tensor:  # weight_size, contiguous
    """Gradient of :func:`forward` in ``w``, summed in float32 at least; a tap that meets only padding gets zero."""
    size = tuple(weight_size)
    return prepare_weight_grad(x, size, fresh_strides(size, False), stride, padding, dilation)(dy, x)


def prepare_weight_grad(
    x: Tensor, weight_size: Sequence[int], weight_stride: Sequence[int], stride: Ints, padding: Ints, dilation: Ints
) -> Callable[[Tensor, Tensor], Tensor]:
    """What :func:`weight_grad` does with every ``dy``, and ``x`` of these sizes, strides and type.

    ``weight_stride``: of the result, whose elements lie as in a contiguous tensor.
    """
    size, strides, groups = tuple(weight_size), tuple(weight_stride), x.shape[1]
    if (taps := taps_of_weight_grad(x, size, stride, padding, dilation)) is not None:
        used = (*size[:2], *taps.counts)
        smaller = prepare_weight_grad(x, used, fresh_strides(used, False), stride, taps.padding, dilation)

        def among_zeros(dy: Tensor, x: Tensor) -> Tensor:
            dw = dy.new_zeros(size)
            taps.of(dw).copy_(smaller(dy, x))
            return dw.as_strided_(size, strides)

        return among_zeros
    plan = choose_weight_grad(x.dtype, x.shape, x.stride(), size, stride, padding, dilation)
    if plan == "torch":
        # past the Python in front of it, which shows in small calls
        backward = torch.ops.aten.convolution_backward.default._op
        w, low = _sized(size, x.dtype), padding[::2]
        unused, only_weight = [0] * len(stride), [False, True, False]

        def as_it_is(dy: Tensor, x: Tensor) -> Tensor:
            dw = backward(dy, x, w, None, stride, low, dilation, False, unused, groups, only_weight)[1]
            if dw.stride() == strides:
                return dw
            return (dw if dw.is_contiguous() else dw.contiguous()).as_strided_(size, strides)

        return as_it_is

    over_taps = weight_grads.plan_over_taps(x, size, stride, padding, dilation) if plan == "taps" else None

    def run(dy: Tensor, x: Tensor) -> Tensor:
        dw = over_taps(dy, x) if over_taps else _weight_grad_by(plan, dy, x, size, stride, padding, dilation)
        return own(dw if dw.stride() == strides else dw.contiguous().as_strided_(size, strides))

    return run


# ------------------------------------------------------------------------------------------------------------- forward


def _forward_by(
    plan: str, x: Tensor, w: Tensor, b: Tensor | None, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    channels, low = x.shape[1], padding[::2]
    if plan == "transposed":
        beyond = [k - 1 - p for k, p in zip(w.shape[2:], low)]
        apart = (
            b is not None and x.dtype is torch.float32
        )  # oneDNN takes longer for the bias than for a small convolution
        y = F.conv_transpose2d(x, w.flip(2, 3), None if apart else b, 1, beyond, 0, channels)
        return y.add_(b.view(-1, 1, 1)) if b is not None and apart else y
    if plan == "float32":
        b = None if b is None else b.float()
        return forward(x.float(), w.float(), b, stride, padding, dilation).to(x.dtype)
    if plan == "multiplier":
        return forward(x.repeat_interleave(w.shape[0] // channels, 1), w, b, stride, padding, dilation)
    if plan == "one channel":
        samples = x.shape[0]
        x, w = _samples_as_channels(x, w)
        b = None if b is None else b.expand(w.shape[0])
        return forward(x, w, b, stride, padding, dilation).transpose(0, 1)[:samples]
    size = reference.conv_output_size(x.shape[2:], w.shape[2:], stride, padding, dilation)
    if plan == "empty":
        return x.new_empty(x.shape[0], w.shape[0], *size)
    if plan == "crop":
        # Padding both sides by low + skip * stride starts `skip` outputs early and ends no sooner.
        skip = [max(0, -(-(high - low) // s)) for low, high, s in zip(low, padding[1::2], stride)]
        both = tuple(low + q * s for low, q, s in zip(low, skip, stride) for _ in range(2))
        return narrowed(forward(x, w, b, stride, both, dilation), size, skip)
    assert plan == "dilation phases", plan
    if _is_finite(w):
        return _forward_in_phases(x, w, b, low, dilation, size)
    return _sum_over_taps(x, w, b, stride, padding, dilation)


def _is_finite(w: Tensor) -> bool:
    w = w.detach()
    total = w.sum() if w.itemsize > 2 else w.sum(dtype=torch.float32)  # the argument alone costs as much as the sum
    return math.isfinite(total.item())


def _plan_guarded(
    x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    convolution, low, groups = CONVOLUTIONS[len(stride)], padding[::2], x.shape[1]
    channels_last = in_channels_last(x, w)
    strides = fresh_strides(_output_size(x, w, stride, padding, dilation), channels_last)

    def run(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if _is_finite(w):
            y = convolution(x, w, b, stride, low, dilation, groups)
        else:
            y = _sum_over_taps(x, w, b, stride, padding, dilation)
        return y if y.stride() == strides else own(in_format(y, channels_last))

    return run


def _plan_over_taps(
    x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    size = _output_size(x, w, stride, padding, dilation)
    strides = fresh_strides(size, in_channels_last(x, w))
    over = tuple(reference.taps(x.shape[2:], size[2:], w.shape[2:], stride, padding, dilation))

    def run(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = x.new_empty_strided(size, strides)
        y = y.zero_() if b is None else y.copy_(b.view(-1, *[1] * len(stride)))
        for tap, inner, outer in over:
            y[outer].addcmul_(x[inner], reference.tap_weight(w, tap))
        return y

    return run


def _output_size(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Ints:
    return (x.shape[0], w.shape[0], *reference.conv_output_size(x.shape[2:], w.shape[2:], stride, padding, dilation))


def _sum_over_taps(x: Tensor, w: Tensor, b: Tensor | None, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    operands = x.to(wide), w.to(wide), None if b is None else b.to(wide)
    return reference.depthwise_conv(*operands, stride, padding, dilation).to(x.dtype)


def _plan_on_pixels(x: Tensor, w: Tensor, stride: Ints, low: Ints) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Copied to channels_last and back in pieces that stay in the cache, where fresh memory costs as much as the copy."""
    n, c = x.shape[:2]
    out = reference.conv_output_size(x.shape[2:], w.shape[2:], stride, _twice(low), (1, 1))
    bytes_of_channel = x.element_size() * max(math.prod(x.shape[2:]), math.prod(out))
    channels = min(c, _PIXEL_CHANNELS * max(1, _PIECE_BYTES // (bytes_of_channel * _PIXEL_CHANNELS)))
    samples = max(1, _PIECE_BYTES // (bytes_of_channel * channels))
    pieces = [
        (slice(i, i + samples), slice(j, j + channels)) for i in range(0, n, samples) for j in range(0, c, channels)
    ]

    def run(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = x.new_empty(n, c, *out)
        for piece in pieces:
            pixels = x[piece].contiguous(memory_format=torch.channels_last)
            bias = None if b is None else b[piece[1]]
            y[piece].copy_(F.conv2d(pixels, w[piece[1]], bias, stride, low, 1, pixels.shape[1]))
        return y

    return run


def _samples_as_channels(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    channels = max(2, x.shape[0])
    return x.transpose(0, 1).expand(1, channels, *x.shape[2:]), w.expand(channels, *w.shape[1:])


def _forward_in_phases(x: Tensor, w: Tensor, b: Tensor | None, low: Ints, dilation: Ints, size: list[int]) -> Tensor:
    """Output ``o`` reads only inputs ``o - low + i * d``, of one phase modulo d: convolves each phase by itself.

    Zeros fill the map up to whole phases, and taps on these zeros do take part: for finite weights only.
    """
    rank = len(dilation)
    fill: list[int] = []
    padding: list[int] = []
    for n, out, k, p, d in zip(x.shape[2:], size, w.shape[2:], low, dilation):
        before, after = p % d, -(n + p % d) % d
        fill += [before, after]
        padding += [p // d, max(0, -(-out // d) + k - 1 - p // d - (n + before + after) // d)]
    x = pad(x, fill) if any(fill) else x
    x = x.view(*x.shape[:2], *(a for n, d in zip(x.shape[2:], dilation) for a in (n // d, d)))
    inner, outer = [2 + 2 * i for i in range(rank)], [3 + 2 * i for i in range(rank)]
    # pixels, whatever the layout was: these copies are made anyway, and that kernel is the faster one on small maps
    x = x.permute(*outer, 0, *inner, 1).flatten(0, rank)
    y = forward(x.movedim(-1, 1), w, b, (1,) * rank, tuple(padding), (1,) * rank).movedim(1, -1)
    y = y.unflatten(0, (*dilation, -1))  # [*dilation, N, *spatial, C]
    y = y.permute(rank, *(a for i in range(rank) for a in (rank + 1 + i, i)), 2 * rank + 1)
    for i in range(rank):
        y = y.flatten(1 + i, 2 + i)
    return narrowed(y.movedim(-1, 1), size)


# ----------------------------------------------------------------------------------------------------------- gradients


def _input_grad_by(plan: str, dy: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    if plan == "empty":
        return dy.new_zeros(size)
    if plan == "float32":
        return input_grad(dy.float(), w.float(), size, stride, padding, dilation).to(dy.dtype)
    if plan == "multiplier":
        wide = torch.promote_types(dy.dtype, torch.float32)  # rounding each of the m terms would cost accuracy
        dx = input_grad(dy.to(wide), w.to(wide), (size[0], w.shape[0], *size[2:]), stride, padding, dilation)
        return dx.unflatten(1, (size[1], -1)).sum(2).to(dy.dtype)
    dy, w = _samples_as_channels(dy, w)
    return input_grad(dy, w, (*dy.shape[:2], *size[2:]), stride, padding, dilation).transpose(0, 1)[: size[0]]


@lru_cache(maxsize=4096)
def _transposed_geometry(
    size: Ints, w_size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> tuple[Ints, Ints, Ints]:
    """Padding and output padding of the transposed convolution, and the padding that crops its result.

    What one side has more padding than the other is taken for input, and its gradient dropped.
    """
    low = _smaller_sides(padding)
    crop = tuple(p - q for p, q in zip(_twice(low), padding))
    grown = [n - before - after for n, before, after in zip(size[2:], crop[::2], crop[1::2])]
    geometry = zip(grown, low, dilation, w_size[2:], stride)
    return low, tuple((n + 2 * p - d * (k - 1) - 1) % s for n, p, d, k, s in geometry), crop


def _weight_grad_by(
    plan: str, dy: Tensor, x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Tensor:
    if plan == "convolution":
        return weight_grads.as_convolution(dy, x, size, stride, padding[::2], dilation)
    if plan == "empty":
        return dy.new_zeros(size)
    if plan == "float32":
        return weight_grad(dy.float(), x.float(), size, stride, padding, dilation).to(x.dtype)
    if plan == "multiplier":
        # not by PyTorch's kernels for one output a channel: they add in longer sequences than those for several
        x = x.repeat_interleave(size[0] // x.shape[1], 1)
        return weight_grads.as_convolution(dy, x, size, stride, padding[::2], dilation)
    low = _twice(_smaller_sides(padding))
    return weight_grad(dy, pad(x, [p - q for p, q in zip(padding, low)]), size, stride, low, dilation)


@lru_cache(maxsize=64)
def _sized(size: Ints, dtype: torch.dtype) -> Tensor:
    """Stands in for an operand of which only the size is read. Kept, as the cost of making one shows in small calls."""
    return torch.empty(size, dtype=dtype, device="cpu")


# -------------------------------------------------------------------------------------------------------------- shared


def _twice(values: Ints) -> Ints:
    return tuple(v for v in values for _ in range(2))


def _smaller_sides(padding: Ints) -> Ints:
    return tuple(map(min, padding[::2], padding[1::2]))
