"""Weight gradients of depthwise convolution on the CPU that are not PyTorch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..native import CONVOLUTIONS, pad
from .depthwise_formulations import Ints, enters_planar_kernel, in_format, narrowed

_GRADIENT_CHANNELS = 384  # in one weight gradient convolution: wider rows miss the cache, narrower ones cost more calls
_PIECE_ELEMENTS = 1 << 18  # of a piece that is multiplied
_SMALL_PIECE, _LARGE_PIECE = 1_000_000, 2_400_000  # bytes of the input of a weight gradient convolution of planes
# Terms of a weight gradient that are added in sequence: more cost accuracy, fewer cost time. PyTorch adds all in small groups.
_FEWEST_TERMS, _MOST_TERMS, _MOST_TERMS_OF_PIXELS = 200, 512, 256


def plan_over_taps(
    x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Callable[[Tensor, Tensor], Tensor]:
    """A sum for each tap, of some samples at a time, whose products stay in the cache."""
    samples = max(1, _PIECE_ELEMENTS * x.shape[0] // x.numel())
    out = reference.conv_output_size(x.shape[2:], size[2:], stride, padding, dilation)
    over = tuple(reference.taps(x.shape[2:], out, size[2:], stride, padding, dilation))
    along = (0, *range(2, x.dim()))

    def run(dy: Tensor, x: Tensor) -> Tensor:
        dw = x.new_zeros(size)
        for some_x, some_dy in zip(x.split(samples), dy.split(samples)):
            for tap, inner, outer in over:
                dw[reference.column_of(tap)] += (some_x[inner] * some_dy[outer]).sum(along)
        return dw

    return run


def as_convolution(dy: Tensor, x: Tensor, size: Ints, stride: Ints, low: Ints, dilation: Ints) -> Tensor:
    """``dw[i] = sum_o dy[o] x[o * stride + i * dilation - low]``: a block of rows of dy is the filter, i the output."""
    rank, height, (out_height, *out) = len(stride), x.shape[2], dy.shape[2:]
    if rank == 2 and out[0] > max(_MOST_TERMS, out_height):  # rows too long for a block: cut the columns
        geometry = (*size[:2], size[3], size[2]), stride[::-1], low[::-1], dilation[::-1]
        return as_convolution(dy.transpose(2, 3), x.transpose(2, 3), *geometry).transpose(2, 3)
    last = (out_height - 1) * stride[0] + dilation[0] * (size[2] - 1) + 1 - low[0]  # dy meets the rows of x before it
    if last <= 0:
        return x.new_zeros(size)
    within = low[-1] <= (out[-1] - 1) * stride[-1]  # the planar kernel wants padding narrower than the filter
    planar = rank == 2 and within and enters_planar_kernel(low[1], size[3])
    most = _MOST_TERMS if planar else _MOST_TERMS_OF_PIXELS
    terms = max(_FEWEST_TERMS, min(most, out_height * math.prod(out) // 6))
    blocks = -(-out_height // max(1, terms // math.prod(out)))
    rows = -(-out_height // blocks)
    planar = planar and (blocks > 1 or low[0] <= (out_height - 1) * stride[0])
    by = _of_planes if planar else _of_pixels
    return by(dy, x, size, stride, low, dilation, blocks, rows, last - height).to(x.dtype)


def _of_planes(
    dy: Tensor,
    x: Tensor,
    size: Ints,
    stride: Ints,
    low: Ints,
    dilation: Ints,
    blocks: int,
    rows: int,  # of dy in a block
    below: int,  # rows that dy meets below x
) -> Tensor:  # float32
    """All blocks of all maps are the channels of one convolution, or of a few whose operands stay in the cache."""
    n, c, height, width = x.shape
    span = (rows - 1) * stride[0] + dilation[0] * (size[2] - 1) + 1
    # a single block leaves the padded rows to the convolution, which skips them
    above, beyond = (low[0], 0) if blocks > 1 else (0, low[0])
    missing = blocks * rows - dy.shape[2]
    below = below + missing * stride[0] if blocks > 1 else min(0, below)
    total = 4 * n * c * blocks * span * width  # bytes
    pieces = max(1, min(3, total // _SMALL_PIECE), -(-total // _LARGE_PIECE))
    channels = -(-n * c // pieces)
    planes, planes_dy = x.reshape(n * c, height, width), dy.reshape(n * c, *dy.shape[2:])
    parts = []
    for first in range(0, n * c, channels):
        maps, filters = planes[first : first + channels].float(), planes_dy[first : first + channels].float()
        maps = pad(maps, (above, below, 0, 0)) if above or below else maps
        filters = pad(filters, (0, missing, 0, 0)) if missing else filters
        folded = blocks * maps.shape[0]
        maps = maps.unfold(1, span, rows * stride[0]).transpose(2, 3) if blocks > 1 else maps
        filters = _spread(filters.reshape(folded, 1, rows, -1), stride)
        part = F.conv2d(maps.reshape(1, folded, -1, width), filters, None, dilation, (beyond, low[1]), 1, folded)
        part = narrowed(part, size[2:]).reshape(-1, blocks, *size[2:])
        parts.append(part.sum(1, keepdim=True) if blocks > 1 else part)
    dw = torch.cat(parts) if pieces > 1 else parts[0]  # [N * C, 1, *kernel]
    return dw if n == 1 else dw.view(n, *size).sum(0)


def _of_pixels(
    dy: Tensor, x: Tensor, size: Ints, stride: Ints, low: Ints, dilation: Ints, blocks: int, rows: int, below: int
) -> Tensor:
    """As :func:`_of_planes`, for two or three dimensions. The maps of some samples are the channels."""
    rank, channels, height = len(stride), x.shape[1], x.shape[2]
    reach = dilation[0] * (size[2] - 1)
    above, beyond = (low[0], 0) if blocks > 1 else (0, low[0])
    below = max(0, below) if blocks > 1 else min(0, below)
    samples = max(1, _GRADIENT_CHANNELS // channels)
    parts = []
    for some_x, some_dy in zip(x.split(samples), dy.split(samples)):
        folded = some_x.shape[0] * channels
        pixels = some_x.permute(*range(2, 2 + rank), 0, 1)[: height + min(0, below)]  # [*spatial, n, C]
        if above or below > 0 or pixels.dtype is not torch.float32 or not pixels.is_contiguous():
            padded = pixels.new_zeros((above + height + below, *pixels.shape[1:]), dtype=torch.float32)
            padded[above : above + pixels.shape[0]] = pixels
            pixels = padded
        maps = pixels.flatten(-2).unsqueeze(0).movedim(-1, 1)  # channels_last
        if folded == 1:  # PyTorch takes a stride that no element needs at its word
            maps = in_format(maps, False)
        total: Tensor | None = None
        for i, block in enumerate(some_dy.split(rows, 2)):
            filters = _spread(block.float(), stride)
            filters = filters.reshape(folded, 1, *filters.shape[2:])
            window = maps.narrow(2, i * rows * stride[0], filters.shape[2] + reach) if blocks > 1 else maps
            part = CONVOLUTIONS[rank](window, filters, None, dilation, (beyond, *low[1:]), 1, folded)
            total = part if total is None else total.add_(part)
        assert total is not None
        part = narrowed(total, size[2:]).transpose(0, 1)
        parts.append(part if folded == channels else part.unflatten(0, (-1, channels)).sum(0))
    return reduce(torch.add, parts)


def _spread(dy: Tensor, stride: Ints) -> Tensor:
    """Puts ``stride - 1`` zeros between neighbours."""
    if max(stride) == 1:
        return dy
    spread = dy.new_zeros(*dy.shape[:2], *((n - 1) * s + 1 for n, s in zip(dy.shape[2:], stride)))
    index: tuple[slice, ...] = tuple(slice(None, None, s) for s in (1, 1, *stride))
    spread[index] = dy
    return spread
