"""Plain definitions of every operator, written from the formulas: the oracle of the tests, in float64.

They loop over the filter taps and index the input directly. Taps that fall on padding do not take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor


def taps(
    input_size: Sequence[int],  # spatial
    output_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],  # (low, high) of each dimension
    dilation: Sequence[int],
) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """Yields tap, slices of the input, slices of the output: ``i = o * stride - low + k * dilation`` inside the input."""
    for tap in product(*map(range, kernel)):
        inner, outer = [], []
        for n, out, k, s, low, d in zip(input_size, output_size, tap, stride, padding[::2], dilation):
            shift = k * d - low
            first = max(0, -(shift // s))  # smallest o with o * s + shift >= 0
            count = max(0, min(out, (n - 1 - shift) // s + 1) - first)
            start = first * s + shift
            inner.append(slice(start, start + (count - 1) * s + 1, s) if count else slice(0, 0))
            outer.append(slice(first, first + count))
        yield tap, (..., *inner), (..., *outer)


def conv_output_size(
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    return [
        (n + padding[2 * i] + padding[2 * i + 1] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i, n in enumerate(input_size)
    ]


def taps_in_reach(size: int, out: int, k: int, s: int, d: int, p: int, u: int = 1) -> tuple[int, int]:
    """First and last of the ``k`` taps that meet more than padding: output ``o`` and input ``i`` meet where ``o s + tap d - p == i u``.

    No more of the first ones are left out than the padding ``p`` in front makes up for.
    """
    first = max(0, min(-(-(p - (out - 1) * s) // d), p // d, k - 1))
    return first, max(first, min(k - 1, ((size - 1) * u + p) // d))


def depthwise_conv(
    x: Tensor,  # [N, C, *spatial]
    w: Tensor,  # [C * m, 1, *kernel]
    b: Tensor | None,  # [C * m]
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_: object,
) -> Tensor:  # [N, C * m, *spatial]
    """``y[n, o, p] = b[o] + sum_k w[o, 0, k] x[n, o // m, p * stride - low + k * dilation]``."""
    size = conv_output_size(x.shape[2:], w.shape[2:], stride, padding, dilation)
    x = x.repeat_interleave(w.shape[0] // x.shape[1], 1)
    y = x.new_zeros(*x.shape[:2], *size)
    for tap, inner, outer in taps(x.shape[2:], size, w.shape[2:], stride, padding, dilation):
        y[outer] += x[inner] * tap_weight(w, tap)
    return y if b is None else y + b.view(-1, *[1] * len(size))


def depthwise_conv_input_grad(
    dy: Tensor,  # [N, C * m, *spatial]
    w: Tensor,  # [C * m, 1, *kernel]
    input_size: Sequence[int],  # [N, C, *spatial]
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_: object,
) -> Tensor:  # input_size
    """Adjoint of :func:`depthwise_conv` in its input."""
    spatial = tuple(input_size[2:])
    dx = dy.new_zeros(*dy.shape[:2], *spatial)
    for tap, inner, outer in taps(spatial, dy.shape[2:], w.shape[2:], stride, padding, dilation):
        dx[inner] += dy[outer] * tap_weight(w, tap)
    return dx.unflatten(1, (input_size[1], -1)).sum(2)


def depthwise_conv_weight_grad(
    dy: Tensor,  # [N, C * m, *spatial]
    x: Tensor,  # [N, C, *spatial]
    weight_size: Sequence[int],  # [C * m, 1, *kernel]
    weight_stride: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_: object,
) -> Tensor:  # weight_size
    """Adjoint of :func:`depthwise_conv` in its weight."""
    x = x.repeat_interleave(dy.shape[1] // x.shape[1], 1)
    dw = dy.new_zeros(tuple(weight_size))
    over = [0, *range(2, dy.dim())]
    for tap, inner, outer in taps(x.shape[2:], dy.shape[2:], weight_size[2:], stride, padding, dilation):
        dw[column_of(tap)] = (x[inner] * dy[outer]).sum(over)
    return dw


def column_of(tap: tuple[int, ...]) -> Any:
    """Index of one tap of all filters."""
    return (slice(None), 0, *tap)


def tap_weight(w: Tensor, tap: tuple[int, ...]) -> Tensor:
    return w[column_of(tap)].view(-1, *[1] * (w.dim() - 2))


def double(reference: Callable[..., Tensor], *args: Any) -> Tensor:
    """Evaluates a reference on float64 copies of its tensors."""
    return reference(*(a.detach().to("cpu", torch.float64) if isinstance(a, Tensor) else a for a in args))
