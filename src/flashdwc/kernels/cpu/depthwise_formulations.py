"""Which formulation a depthwise convolution gets on the CPU.

PyTorch's CPU convolution is oneDNN, which holds two very good depthwise kernels behind narrow doors. A call that misses
the doors runs as one small matrix product per channel, ten to forty times slower. Here every call goes through a door.

- The *planar* kernel serves contiguous inputs, which it reorders itself. Its door: two spatial dimensions, and a
  horizontal padding narrower than the filter and than a register block (six columns in AVX-512). It knows dilation.
- The *pixel* kernel serves channels_last inputs, and 3-D inputs of either layout. Its door: no dilation.

In neither do taps on the padding take part, so a non-finite weight there is harmless. The matrix products multiply it
by stored zeros, which makes NaN: the doors decide the values that such weights give, not only the speed.

Forward
  inside a door                       PyTorch's convolution as it is
  contiguous, wide padding            AVX-512: the pixel kernel on a channels_last copy; AVX2: the transposed convolution
  channels_last, where pixels are     the transposed convolution by the rotated filter: AVX-512: 12 or 13 columns; AVX2: 7 or
  slower                              more on maps that are large against them
  dilation outside the planar door    few taps: a sum over taps, of whole maps; else an undilated convolution of the
                                      interleaved sub-maps, folded into the batch
  one channel                         no kernel is depthwise for it: the batch becomes the channels
  unequal padding                     both sides padded by the larger amount, the result cropped
  channel multiplier                  input channels repeated
  bfloat16, contiguous, 7-11 columns  the pixel kernel on a channels_last copy
  float16                             float32 and back, but where AVX-512 computes in it: few columns, inside a door
  float64; stride with wide dilation; PyTorch's convolution if the weights are finite, else a sum over taps
  AVX2: dilation, little work

Input gradient
  stride 1, dilation or where faster  `forward` of dy by the rotated filter
  else                                PyTorch's transposed convolution, which has a planar kernel for any padding

Weight gradient, summed in float32 at least
  2-D, few taps, in its own kernels   PyTorch's own gradient (its kernels know no dilation)
  2-D, few taps, dilated              AVX2: a sum for each tap
  else                                a convolution of x by dy, a filter as large as the map, in the planar kernel or, with
                                      wide padding or in 3-D, in the pixel kernel: tap (i, j) is output pixel
                                      (i, j), dilation the stride; a stride spreads dy by zeros. The kernels sum in
                                      sequence: blocks of rows of dy keep that accurate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..native import CHANNELS_LAST, like_channels_last, suggests_channels_last, symmetric

Ints = tuple[int, ...]

# Columns that the planar kernel holds in registers; 0 where oneDNN has neither kernel.
_REGISTER_BLOCK = {"AVX512": 6, "AVX2": 4}.get(torch.backends.cpu.get_cpu_capability(), 0)
if not torch.backends.mkldnn.is_available():
    _REGISTER_BLOCK = 0
_HAS_BFLOAT16_KERNELS = _REGISTER_BLOCK == 6 and torch.cpu._is_avx512_bf16_supported()
_HAS_FLOAT16_KERNELS = _REGISTER_BLOCK == 6 and torch.ops.mkldnn._is_mkldnn_fp16_supported()
# Filter columns up to which float16 kernels beat those of float32 between two copies, in channels_last and contiguous.
_FLOAT16_PIXEL_COLUMNS, _FLOAT16_PLANAR_COLUMNS = 11, 7
_SLOW_PLANAR_BFLOAT16_COLUMNS = range(7, 12)
# oneDNN's bfloat16 kernels never return for some numbers of channels and threads and at least so many columns of the filter.
_HANGING_COLUMNS = 14
# Filter columns for which the pixel kernel is no faster than the planar one, and those for which it is far slower.
_SLOW_PIXEL_COLUMNS, _SLOWEST_PIXEL_COLUMNS = range(9, 14), range(12, 14)
_FEW_COLUMNS, _NARROW_PADDING = 7, 4  # of a map in channels_last: the planar kernel refuses wider padding on them
_SMALL_MAP = 14  # rows or columns: on smaller maps the detours cost more than they save
_WORTH_ROTATING = 10_000_000  # products; the same for rotating the filter
_RATHER_FEW_TAPS, _FEW_TAPS, _VERY_FEW_TAPS = 49, 25, 15  # for which PyTorch's weight gradient is good
_FEW_CHANNELS, _SMALL_INPUT, _MEDIUM_INPUT = 64, 10_000, 400_000  # of all samples together; elements
# Products: the detours cost more than PyTorch's small matrix products, and a function in Python in the graph more yet.
_SMALL_WORK = 1_000_000

# What the plans do, for `explain`; the comment on top says where each applies.
FORMULATIONS = {
    "direct": "PyTorch's convolution as it is",
    "torch": "PyTorch's gradient as it is",
    "pixel": "the channels_last kernel, on a copy",
    "transposed": "the transposed convolution by the rotated filter",
    "rotated": "a convolution by the rotated filter",
    "convolution": "a convolution of the input by the output gradient",
    "dilation phases": "an undilated convolution of each interleaved sub-map",
    "taps": "a sum over taps",
    "guarded": "PyTorch's convolution if the weights are finite, else a sum over taps",
    "one channel": "the batch folded into channels",
    "multiplier": "input channels repeated",
    "crop": "padded evenly, then cropped",
    "pad": "padded first",
    "float32": "in float32",
    "empty": "nothing to compute",
}


@lru_cache(maxsize=4096)
def choose_forward(
    dtype: torch.dtype,
    size: Ints,
    strides: Ints,
    w_size: Ints,
    w_strides: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
) -> str:
    kernel, rank, dilated = w_size[2:], len(stride), max(dilation) > 1
    if 0 in size:
        return "empty"
    if not symmetric(padding):
        return "crop"
    one_tap_on_padding = math.prod(kernel) == 1 and max(padding) > 0  # goes to a matrix product
    if dtype is torch.float64 or not _REGISTER_BLOCK or one_tap_on_padding:
        return "guarded"
    channels_last = like_channels_last(size, strides) or like_channels_last(w_size, w_strides)
    float16 = dtype is torch.float16 and rank == 2 and not dilated and _has_float16_kernel(kernel[1], channels_last)
    if not _has_kernels(dtype, w_size) and not float16:
        return "float32"
    if math.prod(size[2:]) == 1 < math.prod(kernel):  # PyTorch's kernels multiply the padding of a single pixel
        return "guarded"
    if w_size[0] != size[1]:
        return "multiplier"
    if size[1] == 1:
        return "one channel"
    transposable = rank == 2 and max(stride) == 1 and max(padding) < min(kernel)
    if not dilated and (channels_last or rank == 3):
        return "transposed" if transposable and _pixels_are_slower(kernel[1], min(size[2:])) else "direct"
    columns = reference.conv_output_size(size[2:], kernel, stride, padding, dilation)[-1]
    refused = channels_last and columns <= _FEW_COLUMNS and padding[-1] > _NARROW_PADDING
    narrow = enters_planar_kernel(padding[-1], columns) and not refused
    if rank == 2 and narrow and all(p <= d * (k - 1) for p, d, k in zip(padding[::2], dilation, kernel)):
        slow = dtype is torch.bfloat16 and not dilated
        return "pixel" if slow and kernel[1] in _SLOW_PLANAR_BFLOAT16_COLUMNS else "direct"
    if float16:
        return "float32"
    if not dilated:
        return "transposed" if transposable and _REGISTER_BLOCK == 4 else "pixel"
    if max(stride) > 1:
        return "guarded"
    few = math.prod(kernel) <= _VERY_FEW_TAPS and dtype is torch.float32
    if _REGISTER_BLOCK == 4:
        if not channels_last and _is_small(size, w_size) and (columns <= _FEW_COLUMNS or not few):
            return "guarded"
        worth = not channels_last or min(size[2:]) <= _SMALL_MAP
    else:
        worth = not channels_last and math.prod(size) <= _MEDIUM_INPUT
    return "taps" if few and worth else "dilation phases"


@lru_cache(maxsize=4096)
def choose_input_grad(
    dtype: torch.dtype,
    size: Ints,
    dy_size: Ints,
    dy_strides: Ints,
    w_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
) -> str:
    if 0 in size:
        return "empty"
    if dtype is torch.float64 or not _REGISTER_BLOCK:
        return "torch"
    if not _has_kernels(dtype, w_size) or (dtype is torch.bfloat16 and max(stride) > 1):
        return "float32"
    if w_size[0] != size[1]:
        return "multiplier"
    if size[1] == 1:
        return "one channel"
    if max(stride) > 1:
        return "torch"
    if not symmetric(padding) or len(stride) == 3 or max(dilation) > 1:
        return "rotated"
    columns, channels_last = w_size[-1], like_channels_last(dy_size, dy_strides)
    if _REGISTER_BLOCK == 4:
        small, inside = min(size[2:]) <= _SMALL_MAP, max(columns - 1 - p for p in padding[2:]) <= _REGISTER_BLOCK
        many = columns > 10 and math.prod(w_size[2:]) > _FEW_TAPS
        return "rotated" if (small and many if channels_last else inside and columns > 3) else "torch"
    products = math.prod(size) * math.prod(map(min, size[2:], w_size[2:]))
    map_side, beyond = min(size[2:]), columns - 1 - padding[-1]
    if channels_last or beyond > _REGISTER_BLOCK:  # the pixel kernel, on a copy where the layout is contiguous
        worth = products >= _WORTH_ROTATING and map_side >= _SMALL_MAP + (not channels_last)
        worth = worth and columns not in _SLOW_PIXEL_COLUMNS
    else:
        enough = columns >= (7 if map_side > _SMALL_MAP else 5)
        worth = enough and products * (2 if columns >= 11 else 1) >= _WORTH_ROTATING
    return "rotated" if worth else "torch"


@lru_cache(maxsize=4096)
def choose_weight_grad(
    dtype: torch.dtype, size: Ints, strides: Ints, w_size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> str:
    if 0 in size:
        return "empty"
    if not symmetric(padding):
        return "pad"
    if dtype is torch.float64 or not _REGISTER_BLOCK:
        return "torch" if dtype.itemsize > 2 else "float32"
    if w_size[0] != size[1]:
        return "multiplier"
    planar = not like_channels_last(size, strides)
    in_its_kernel = w_size[-1] <= 3 and max(dilation) == 1  # PyTorch's planar one
    # the pixel kernel takes as long for few channels as for many
    idle = size[0] * size[1] <= _FEW_CHANNELS and not enters_planar_kernel(padding[-1], w_size[-1])
    few_taps = _VERY_FEW_TAPS if planar else _RATHER_FEW_TAPS if idle else _FEW_TAPS
    if len(stride) == 3 or math.prod(w_size[2:]) > few_taps:
        return "convolution"
    foreign = max(dilation) > 1 or (planar and not in_its_kernel and not idle)
    if foreign and math.prod(size) > _SMALL_INPUT:
        very_few = max(dilation) > 1 and math.prod(w_size[2:]) <= _VERY_FEW_TAPS and _REGISTER_BLOCK == 4
        return "taps" if very_few and dtype is torch.float32 and not (planar and max(stride) > 1) else "convolution"
    if dtype is torch.float32:
        return "torch"
    if not in_its_kernel:  # which alone sums halves in float32
        return "convolution"
    # oneDNN's strided bfloat16 kernel reads past narrow maps
    return "torch" if _has_kernels(dtype, w_size) and max(stride) == 1 else "float32"


# The taps that a call is made with in place of all. PyTorch's undilated kernels pass over the others by themselves.


def taps_of_forward(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Taps | None:
    steps = stride, padding, dilation
    plan = choose_forward(x.dtype, x.shape, x.stride(), w.shape, w.stride(), *steps)
    return _taps_of_call(plan == "direct", x.shape, w.shape, *steps)


def taps_of_input_grad(dy: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Taps | None:
    steps = stride, padding, dilation
    plan = choose_input_grad(dy.dtype, size, dy.shape, dy.stride(), w.shape, *steps)
    return _taps_of_call(plan == "torch", size, w.shape, *steps)


def taps_of_weight_grad(x: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Taps | None:
    steps = stride, padding, dilation
    plan = choose_weight_grad(x.dtype, x.shape, x.stride(), size, *steps)
    return _taps_of_call(plan == "torch", x.shape, size, *steps)


def _taps_of_call(
    is_pytorchs: bool, size: Ints, w_size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> Taps | None:
    passes_over = is_pytorchs and max(dilation) == 1
    return None if passes_over else taps_that_meet(size, w_size, stride, padding, dilation)


def choose_for_autograd(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> str | None:
    """The convolution of PyTorch's that autograd had better follow than our own function with its gradients, if any."""
    size, w_size, steps = x.shape, w.shape, (stride, padding, dilation)
    if x.dtype is not torch.float32 or 0 in size:
        return None
    plan = choose_forward(x.dtype, size, x.stride(), w_size, w.stride(), *steps)
    channels_last = in_channels_last(x, w)
    simple = w_size[0] == size[1] > 1 and symmetric(padding) and len(stride) == 2 and not channels_last
    few = max(dilation) > 1 or math.prod(w_size[2:]) <= _VERY_FEW_TAPS
    if plan != "direct" and _REGISTER_BLOCK == 4 and simple and few and _is_small(size, w_size):
        return "guarded"
    if max(dilation) > 1 and taps_that_meet(size, w_size, *steps) is not None:
        return None
    out = (size[0], w_size[0], *reference.conv_output_size(size[2:], w_size[2:], *steps))
    own = (
        plan == "direct"
        and choose_input_grad(x.dtype, size, out, fresh_strides(out, channels_last), w_size, *steps) == "torch"
        and choose_weight_grad(x.dtype, size, x.stride(), w_size, *steps) == "torch"
    )
    return plan if own else None


def _is_small(size: Ints, w_size: Ints) -> bool:
    return math.prod(size) * math.prod(w_size[2:]) <= _SMALL_WORK


def describe_forward(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, *_: str
) -> str:
    if (taps := taps_of_forward(x, w, stride, padding, dilation)) is not None:
        return describe_forward(x, taps.of(w), b, stride, taps.padding, dilation)
    return FORMULATIONS[choose_forward(x.dtype, x.shape, x.stride(), w.shape, w.stride(), stride, padding, dilation)]


def describe_input_grad(dy: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, *_: str) -> str:
    if (taps := taps_of_input_grad(dy, w, size, stride, padding, dilation)) is not None:
        return describe_input_grad(dy, taps.of(w), size, stride, taps.padding, dilation)
    return FORMULATIONS[choose_input_grad(dy.dtype, size, dy.shape, dy.stride(), w.shape, stride, padding, dilation)]


def describe_weight_grad(
    dy: Tensor, x: Tensor, size: Ints, strides: Ints, stride: Ints, padding: Ints, dilation: Ints, *_: str
) -> str:
    if (taps := taps_of_weight_grad(x, size, stride, padding, dilation)) is not None:
        size, padding = (*size[:2], *taps.counts), taps.padding
    return FORMULATIONS[choose_weight_grad(x.dtype, x.shape, x.stride(), size, stride, padding, dilation)]


def in_channels_last(x: Tensor, w: Tensor) -> bool:
    return suggests_channels_last(x) or suggests_channels_last(w)


@lru_cache(maxsize=4096)
def fresh_strides(size: Ints, channels_last: bool) -> Ints:
    fmt = CHANNELS_LAST[len(size)] if channels_last else torch.contiguous_format
    return torch.empty(size, device="meta", memory_format=fmt).stride()


def in_format(y: Tensor, channels_last: bool) -> Tensor:
    """Dense in the format, with a fresh tensor's strides, also where a dimension of 1 leaves them free."""
    strides = fresh_strides(y.shape, channels_last)
    if y.stride() == strides:
        return y
    fmt = CHANNELS_LAST[y.dim()] if channels_last else torch.contiguous_format
    if not y.is_contiguous(memory_format=fmt):
        y = y.contiguous(memory_format=fmt)
    return y.as_strided(y.shape, strides)


def enters_planar_kernel(padding: int, columns: int) -> bool:
    """Horizontal padding and columns of the output."""
    return padding <= min(_REGISTER_BLOCK, columns)


def _pixels_are_slower(columns: int, map_side: int) -> bool:
    """Than the transposed convolution, for channels_last."""
    if _REGISTER_BLOCK == 4:
        return 7 <= columns and map_side >= max(28, 1.8 * columns)
    return columns in _SLOWEST_PIXEL_COLUMNS and map_side >= _SMALL_MAP


def _has_float16_kernel(columns: int, channels_last: bool) -> bool:
    return _HAS_FLOAT16_KERNELS and columns <= (_FLOAT16_PIXEL_COLUMNS if channels_last else _FLOAT16_PLANAR_COLUMNS)


def _has_kernels(dtype: torch.dtype, w_size: Ints) -> bool:
    return dtype is torch.float32 or (
        dtype is torch.bfloat16 and _HAS_BFLOAT16_KERNELS and w_size[-1] < _HANGING_COLUMNS
    )


class Taps(NamedTuple):
    """Some rows and columns of a filter, with the padding that they leave."""

    firsts: Ints
    counts: Ints
    padding: Ints

    def of(self, w: Tensor) -> Tensor:
        return narrowed(w, self.counts, self.firsts)


@lru_cache(maxsize=4096)
def taps_that_meet(size: Ints, w_size: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Taps | None:
    """Those that meet more than padding; None where all do. With the others padding and dilation of thousands take as much memory."""
    kernel, found = tuple(w_size[2:]), []
    out = reference.conv_output_size(size[2:], kernel, stride, padding, dilation)
    for i, (n, k, s, d, o) in enumerate(zip(size[2:], kernel, stride, dilation, out)):
        low, high = padding[2 * i : 2 * i + 2]
        first, last = reference.taps_in_reach(n, o, k, s, d, low)
        last = max(last, k - 1 - high // d)
        found.append((first, last + 1 - first, low - first * d, high - (k - 1 - last) * d))
    firsts, counts, lows, highs = zip(*found)
    if counts == kernel or 0 in size:
        return None
    return Taps(firsts, counts, tuple(p for pair in zip(lows, highs) for p in pair))


def narrowed(y: Tensor, size: Sequence[int], start: Sequence[int] = (0, 0, 0)) -> Tensor:
    for i, (n, first) in enumerate(zip(size, start)):
        y = y.narrow(2 + i, first, n)
    return y
