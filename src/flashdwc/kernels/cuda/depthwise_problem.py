"""What a depthwise kernel has to do: the geometry of the convolution and how its tensors lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import conv_output_size, taps_in_reach


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution: output ``o``, input ``i`` and tap ``k`` meet where ``o * s + k * d - p == i * u``."""

    size: int  # of the input
    out: int
    k: int
    s: int
    d: int
    p: int
    u: int = 1
    skipped: int = 0  # taps of the filter in front of the k that are used
    whole: int = 0  # taps of the filter; 0: those that are used

    @property
    def reached(self) -> Axis:
        """Without the taps that meet nothing but padding."""
        first, last = taps_in_reach(self.size, self.out, self.k, self.s, self.d, self.p, self.u)
        return replace(self, k=last - first + 1, p=self.p - first * self.d, skipped=first, whole=self.k)

    @property
    def phase(self) -> int:
        return self.p % self.u

    @property
    def first(self) -> int:
        return self.p // self.u

    def span(self, taps: int, outputs: int) -> int:
        """Inputs that ``taps`` taps reach from ``outputs`` neighbouring outputs."""
        return ((taps - 1) * self.d + (outputs - 1) * self.s - self.phase) // self.u + 1

    def transposed(self) -> Axis:
        """The axis of the input gradient, with the taps in reverse order."""
        return Axis(self.out, self.size, self.k, 1, self.d, (self.k - 1) * self.d - self.p, self.s)


TALL = 13  # rows of a filter
MULTIPROCESSORS = 132  # of the card that the rules and cost models were fitted on


class Layout(NamedTuple):
    nhwc: bool  # channels are neighbours in memory, else columns are
    vector: int  # elements of the widest aligned access
    run: int = 0  # the same where all channels of an image are one run of memory; 0: they are not


@dataclass(frozen=True)
class Problem:
    """What the choice of a kernel and its tile depends on. ``inner`` is what is read with the taps, ``outer`` the other."""

    images: int
    channels: int  # of the result (of the weight, for its gradient)
    vertical: Axis
    horizontal: Axis
    inner: Layout = Layout(True, 8)
    outer: Layout = Layout(True, 8)
    spread: int = 1  # results that one input channel feeds
    sum: int = 1  # input channels that feed one result
    linear: bool = False  # the rows are parts, one behind the other, of one long row
    swapped: bool = False  # ``vertical`` is the tensors' horizontal axis, and the other way round

    @property
    def taps(self) -> int:
        return self.vertical.k * self.horizontal.k

    @property
    def by_octets(self) -> bool:
        """Do both tensors lie in channels_last and allow accesses of 8 channels?"""
        return self.inner == self.outer == Layout(True, 8)

    @property
    def strided(self) -> bool:
        v, h = self.vertical, self.horizontal
        return max(v.s, h.s, v.u, h.u) > 1

    @property
    def folded(self) -> Problem:
        """One long row cut into rows as wide as a tile, so that tiles have rows to share."""
        v, h = self.vertical, self.horizontal
        width = 64 * h.u
        if (v.size, v.out, v.k, v.s, v.u, v.p) != (1, 1, 1, 1, 1, 0) or h.out <= width:
            return self
        rows = -(-h.out // width)
        return replace(self, vertical=replace(v, size=rows, out=rows), horizontal=replace(h, out=width), linear=True)

    @property
    def with_long_rows(self) -> Problem:
        """A tall filter laid down, where pixels lie alike along both axes: the matrix products put a filter's columns into windows of
        several outputs, and the more columns there are, the less of a window is zeros."""
        v, h = self.vertical, self.horizontal
        if not (self.inner.nhwc and self.outer.nhwc) or v.k < TALL or v.k < 2 * h.k:
            return self
        return replace(self, vertical=h, horizontal=v, swapped=not self.swapped)

    def in_order(self, numbers: Sequence[int]) -> tuple[int, int, int, int]:
        """Sizes or strides of images, channels and both axes from the tensors' order to the problem's, or back."""
        n, c, h, w = numbers
        return (n, c, w, h) if self.swapped else (n, c, h, w)

    @property
    def outputs(self) -> int:
        return self.images * self.channels * self.vertical.out * self.horizontal.out

    @property
    def empty(self) -> bool:
        return self.outputs == 0


def layout(size: Sequence[int], strides: Sequence[int], address: int = 0) -> Layout | None:
    """How the kernels read a [N, C, H, W] tensor; None where neither channels nor columns are neighbours in memory."""
    channels, columns = size[1], size[3]
    if strides[1] == 1 and channels > 1:
        nhwc = True
    elif strides[3] == 1 or columns == 1:
        nhwc = False
    elif channels == 1:
        nhwc = True
    else:
        return None
    steps = [s for i, (n, s) in enumerate(zip(size, strides)) if n > 1 and i != (1 if nhwc else 3)]
    vector = 8
    while vector > 1 and (size[1 if nhwc else 3] % vector or address % (2 * vector) or any(s % vector for s in steps)):
        vector //= 2
    run = 0
    if not nhwc and all(
        n == 1 or s == dense for n, s, dense in zip(size[1:], strides[1:], (size[2] * size[3], size[3], 1))
    ):
        image = strides[0] if size[0] > 1 else 0
        run = next(v for v in (8, 4, 2, 1) if address % (2 * v) == 0 and image % v == 0)
    return Layout(nhwc, vector, run)


def readable(t: Tensor) -> Tensor:
    """``t``, copied only where the kernels cannot read its strides."""
    return t if layout(t.shape, t.stride()) is not None else t.contiguous(memory_format=_format_of_copy(t))


def _format_of_copy(t: Tensor) -> torch.memory_format:
    _, channel, _, column = (s if n > 1 else float("inf") for n, s in zip(t.shape, t.stride()))
    return torch.channels_last if channel < column else torch.contiguous_format


def _layout_of(t: Tensor) -> Layout:
    address = 0 if t.device.type == "meta" else t.data_ptr() % 16
    return layout(t.shape, t.stride(), address) or dense_layout(t.shape, _format_of_copy(t))[1]


def dense_layout(size: Sequence[int], memory_format: torch.memory_format) -> tuple[tuple[int, ...], Layout]:
    """Strides and layout of a new tensor."""
    strides = torch.empty(tuple(size), device="meta", memory_format=memory_format).stride()
    return strides, layout(size, strides) or Layout(False, 1)


def _axes(
    out: Sequence[int], inner: Sequence[int], kernel: Sequence[int], stride, padding, dilation
) -> tuple[Axis, Axis]:
    """Of the forward convolution."""
    first, second = (Axis(inner[i], out[i], kernel[i], stride[i], dilation[i], padding[2 * i]) for i in range(2))
    return first, second


def forward_problem(x: Tensor, w: Tensor, memory_format, stride, padding, dilation) -> Problem:
    out = conv_output_size(x.shape[2:], w.shape[2:], stride, padding, dilation)
    axes = _axes(out, x.shape[2:], w.shape[2:], stride, padding, dilation)
    _, outer = dense_layout((x.shape[0], w.shape[0], *out), memory_format)
    vertical, horizontal = (axis.reached for axis in axes)
    spread = w.shape[0] // x.shape[1]
    return Problem(x.shape[0], w.shape[0], vertical, horizontal, _layout_of(x), outer, spread=spread).with_long_rows


def input_grad_problem(dy: Tensor, w: Tensor, memory_format, input_size, stride, padding, dilation) -> Problem:
    vertical, horizontal = _axes(dy.shape[2:], input_size[2:], w.shape[2:], stride, padding, dilation)
    axes = vertical.transposed().reached, horizontal.transposed().reached
    _, outer = dense_layout(input_size, memory_format)
    return Problem(
        input_size[0], input_size[1], *axes, _layout_of(dy), outer, sum=w.shape[0] // input_size[1]
    ).with_long_rows


def weight_grad_problem(dy: Tensor, x: Tensor, weight_size, stride, padding, dilation) -> Problem:
    axes = _axes(dy.shape[2:], x.shape[2:], weight_size[2:], stride, padding, dilation)
    spread = weight_size[0] // x.shape[1]
    return Problem(x.shape[0], weight_size[0], *axes, _layout_of(x), _layout_of(dy), spread=spread).with_long_rows
