"""Launches the 16-bit depthwise kernels: plans for forward, input gradient and weight gradient on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import jit
from ...core.backend import Backend, Plan
from .depthwise_tiles import Axis, Problem, Tile, conv_macros, conv_tile, grid, weight_grad_macros, weight_grad_tile

TENSOR4 = "5q"  # struct Tensor4
CONV_LAYOUT = f"={TENSOR4}{TENSOR4}2q9i"
WEIGHT_GRAD_LAYOUT = f"={TENSOR4}{TENSOR4}q12i"
REDUCE_LAYOUT = "=3qi"
MAX_BLOCKS = 2**31 - 1
SHARED_BYTES = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}  # KiB a block may take; else 99


class View(NamedTuple):
    """A [N, C, H, W] tensor as the kernels read it."""

    nhwc: bool
    vector: int  # elements of the widest access
    strides: tuple[int, ...]  # image, channel, row, column


def _view(size: Sequence[int], strides: Sequence[int], address: int) -> View | None:
    """None where neither channels nor columns are neighbours in memory."""
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
    return View(nhwc, vector, tuple(strides))


def _dense_format(t: Tensor) -> torch.memory_format:
    nearest = min((s, i) for i, s in enumerate(t.stride()) if t.shape[i] > 1) if t.numel() > 1 else (1, 3)
    return torch.channels_last if nearest[1] == 1 else torch.contiguous_format


def _readable(t: Tensor) -> Tensor:
    return t if _view(t.shape, t.stride(), 0) else t.contiguous(memory_format=_dense_format(t))


@lru_cache(maxsize=32)
def _shared_limit(device: torch.device) -> int:
    return SHARED_BYTES.get(torch.cuda.get_device_capability(device), 99) * 1024


def _why_not(x: Tensor) -> str | None:
    if not x.is_cuda:
        return f"the tensors are on {x.device}"
    if x.dim() != 4:
        return "the kernels are two-dimensional"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels are for float16 and bfloat16, not {x.dtype}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the kernels need compute capability 8.0"
    return jit.why_unavailable()


def _axes(
    out: Sequence[int], inner: Sequence[int], kernel: Sequence[int], stride, padding, dilation
) -> tuple[Axis, Axis]:
    """Of the forward convolution."""
    first, second = (
        Axis(size=inner[i], out=out[i], k=kernel[i], s=stride[i], d=dilation[i], p=padding[2 * i]) for i in range(2)
    )
    return first, second


def _transposed(axis: Axis) -> Axis:
    """The axis of the input gradient, with the taps in reverse order."""
    return Axis(axis.out, axis.size, axis.k, 1, axis.d, (axis.k - 1) * axis.d - axis.p, axis.s)


def _forward_problem(x: Tensor, w: Tensor, stride, padding, dilation) -> Problem:
    from ..reference import conv_output_size

    out = conv_output_size(x.shape[2:], w.shape[2:], stride, padding, dilation)
    vertical, horizontal = _axes(out, x.shape[2:], w.shape[2:], stride, padding, dilation)
    return Problem(x.shape[0], w.shape[0], vertical, horizontal, spread=w.shape[0] // x.shape[1])


def _input_grad_problem(dy: Tensor, w: Tensor, input_size, stride, padding, dilation) -> Problem:
    axes = _axes(dy.shape[2:], input_size[2:], w.shape[2:], stride, padding, dilation)
    vertical, horizontal = map(_transposed, axes)
    return Problem(input_size[0], input_size[1], vertical, horizontal, sum=w.shape[0] // input_size[1])


def _weight_grad_problem(dy: Tensor, x: Tensor, weight_size, stride, padding, dilation) -> Problem:
    vertical, horizontal = _axes(dy.shape[2:], x.shape[2:], weight_size[2:], stride, padding, dilation)
    return Problem(x.shape[0], weight_size[0], vertical, horizontal, spread=weight_size[0] // x.shape[1])


def _why_no_tile(tile: Tile | None, problem: Problem, limit: int) -> str | None:
    if problem.images * problem.vertical.out * problem.horizontal.out == 0:
        return None
    if tile is None:
        return (
            f"no tile of a {problem.vertical.k}x{problem.horizontal.k} kernel fits {limit // 1024} KiB of shared memory"
        )
    if grid(problem, tile)[0] > MAX_BLOCKS:
        return "the grid would exceed 2^31 blocks"
    return None


def _tensor_macros(prefix: str, view: View) -> dict[str, int]:
    return {f"{prefix}_NHWC": int(view.nhwc), f"{prefix}_VEC": view.vector}


def _describe_tile(problem: Problem, tile: Tile) -> str:
    return (
        f"tensor cores, tile {tile.channels} channels x {tile.images} images x {tile.out_rows} rows x "
        f"{tile.blocks * 8 * problem.horizontal.u} columns, {tile.warps} warps"
    )


def _plan_conv(
    problem: Problem, source: Tensor, result_size: Sequence[int], result_format: torch.memory_format, rotate: bool
) -> Plan:
    """Shared by forward and input gradient: takes the source, the weight and perhaps a bias."""
    device, dtype = source.device, source.dtype
    result_size = tuple(result_size)
    strides = torch.empty(result_size, device="meta", memory_format=result_format).stride()
    if 0 in result_size:
        return lambda *_: torch.empty_strided(result_size, strides, dtype=dtype, device=device)
    limit = _shared_limit(device)
    tile = conv_tile(problem, limit)
    assert tile is not None  # why_not has seen to it
    strided = _view(source.shape, source.stride(), source.data_ptr() % 16)
    readable = source if strided else _readable(source)
    inner = strided or _view(readable.shape, readable.stride(), 0)
    outer = _view(result_size, strides, 0)
    assert inner is not None and outer is not None
    macros, shared = conv_macros(problem, tile)
    blocks, across, down, channel_blocks = grid(problem, tile)
    vertical, horizontal = problem.vertical, problem.horizontal
    launch = jit.Launcher(
        "depthwise_conv",
        {
            **macros,
            **_tensor_macros("IN", inner),
            **_tensor_macros("OUT", outer),
            "SHIFT": 0 if inner.nhwc else -horizontal.first % inner.vector,
            "BF16": int(dtype is torch.bfloat16),
            "ROTATE": int(rotate),
        },
        device,
        blocks=blocks,
        threads=32 * tile.warps,
        shared_bytes=shared,
        layout=CONV_LAYOUT,
        values=[0, *inner.strides, 0, *outer.strides, 0, 0, problem.images, problem.channels, vertical.size, horizontal.size,
                vertical.out, horizontal.out, across, down, channel_blocks],
        pointers=(0, 5, 10, 11),
    )  # fmt: skip

    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        if strided is None:
            x = _readable(x)
        if not w.is_contiguous():
            w = w.contiguous()
        if b is not None and not b.is_contiguous():
            b = b.contiguous()
        y = torch.empty_strided(result_size, strides, dtype=dtype, device=device)
        launch(x.data_ptr(), y.data_ptr(), w.data_ptr(), 0 if b is None else b.data_ptr())
        return y

    return run


def _output_format(*operands: Tensor) -> torch.memory_format:
    from ...ops.depthwise_operators import output_format

    return output_format(*operands)


# --- forward -----------------------------------------------------------------------------------------------------------


def _forward_why_not(x, w, b, stride, padding, dilation, *_: Any) -> str | None:
    if (why := _why_not(x)) is not None:
        return why
    problem, limit = _forward_problem(x, w, stride, padding, dilation), _shared_limit(x.device)
    return _why_no_tile(conv_tile(problem, limit), problem, limit)


def _forward_plan(x, w, b, stride, padding, dilation, *_: Any) -> Plan:
    problem = _forward_problem(x, w, stride, padding, dilation)
    size = (x.shape[0], w.shape[0], problem.vertical.out, problem.horizontal.out)
    return _plan_conv(problem, x, size, _output_format(x, w), rotate=False)


def _forward_describe(x, w, b, stride, padding, dilation, *_: Any) -> str:
    problem = _forward_problem(x, w, stride, padding, dilation)
    tile = conv_tile(problem, _shared_limit(x.device))
    return _describe_tile(problem, tile) if tile else "nothing to compute"


# --- input gradient ----------------------------------------------------------------------------------------------------


def _input_grad_why_not(dy, w, input_size, stride, padding, dilation, *_: Any) -> str | None:
    if (why := _why_not(dy)) is not None:
        return why
    problem, limit = _input_grad_problem(dy, w, input_size, stride, padding, dilation), _shared_limit(dy.device)
    return _why_no_tile(conv_tile(problem, limit), problem, limit)


def _input_grad_plan(dy, w, input_size, stride, padding, dilation, *_: Any) -> Plan:
    problem = _input_grad_problem(dy, w, input_size, stride, padding, dilation)
    return _plan_conv(problem, dy, input_size, _output_format(dy, w), rotate=True)


def _input_grad_describe(dy, w, input_size, stride, padding, dilation, *_: Any) -> str:
    problem = _input_grad_problem(dy, w, input_size, stride, padding, dilation)
    tile = conv_tile(problem, _shared_limit(dy.device))
    return _describe_tile(problem, tile) if tile else "nothing to compute"


# --- weight gradient ---------------------------------------------------------------------------------------------------


def _weight_grad_why_not(dy, x, weight_size, weight_stride, stride, padding, dilation, *_: Any) -> str | None:
    if (why := _why_not(x)) is not None:
        return why
    problem, limit = _weight_grad_problem(dy, x, weight_size, stride, padding, dilation), _shared_limit(x.device)
    return _why_no_tile(weight_grad_tile(problem, limit), problem, limit)


def _weight_grad_plan(dy, x, weight_size, weight_stride, stride, padding, dilation, *_: Any) -> Plan:
    device, dtype = x.device, x.dtype
    problem = _weight_grad_problem(dy, x, weight_size, stride, padding, dilation)
    vertical, horizontal = problem.vertical, problem.horizontal
    if dy.numel() == 0:
        return lambda *_: torch.empty_strided(weight_size, weight_stride, dtype=dtype, device=device).zero_()
    tile = weight_grad_tile(problem, _shared_limit(device))
    assert tile is not None  # why_not has seen to it
    views = []
    for t in (x, dy):
        readable = _readable(t)
        views.append(_view(t.shape, t.stride(), t.data_ptr() % 16) or _view(readable.shape, readable.stride(), 0))
    inner, outer = views
    assert inner is not None and outer is not None
    macros, shared = weight_grad_macros(problem, tile)
    blocks, across, down, channel_blocks = grid(problem, tile)
    tiles, height_blocks = blocks // channel_blocks, -(-vertical.k // tile.chunk)
    resident = tile.per_sm * torch.cuda.get_device_properties(device).multi_processor_count
    splits = max(1, min(tiles, -(-4 * resident // (channel_blocks * height_blocks)), 4096))
    taps = vertical.k * horizontal.k
    launch = jit.Launcher(
        "depthwise_weight_grad",
        {
            **macros,
            **_tensor_macros("IN", inner),
            **_tensor_macros("OUT", outer),
            "SHIFT": 0 if inner.nhwc else -horizontal.p % inner.vector,
            "BF16": int(dtype is torch.bfloat16),
        },
        device,
        blocks=channel_blocks * height_blocks * splits,
        threads=32 * tile.warps,
        shared_bytes=shared,
        layout=WEIGHT_GRAD_LAYOUT,
        values=[0, *inner.strides, 0, *outer.strides, 0, problem.images, problem.channels, vertical.size, horizontal.size,
                vertical.out, horizontal.out, across, down, channel_blocks, height_blocks, tiles, splits],
        pointers=(0, 5, 10),
    )  # fmt: skip
    count = problem.channels * taps
    reduce = jit.Launcher(
        "reduce_partials",
        {"BF16": int(dtype is torch.bfloat16)},
        device,
        blocks=-(-count // 32),
        threads=256,
        shared_bytes=0,
        layout=REDUCE_LAYOUT,
        values=[0, 0, count, splits],
        pointers=(0, 1),
    )

    def run(dy: Tensor, x: Tensor) -> Tensor:
        dy, x = _readable(dy), _readable(x)
        partials = torch.empty(splits * count, dtype=torch.float32, device=device)
        dw = torch.empty_strided(weight_size, weight_stride, dtype=dtype, device=device)
        launch(x.data_ptr(), dy.data_ptr(), partials.data_ptr())
        reduce(partials.data_ptr(), dw.data_ptr())
        return dw

    return run


def _weight_grad_describe(dy, x, weight_size, weight_stride, stride, padding, dilation, *_: Any) -> str:
    problem = _weight_grad_problem(dy, x, weight_size, stride, padding, dilation)
    tile = weight_grad_tile(problem, _shared_limit(x.device))
    return _describe_tile(problem, tile) + f", {tile.chunk} filter rows a block" if tile else "nothing to compute"


forward = Backend("cuda", _forward_why_not, _forward_plan, describe=_forward_describe)
input_grad = Backend("cuda", _input_grad_why_not, _input_grad_plan, describe=_input_grad_describe)
weight_grad = Backend("cuda", _weight_grad_why_not, _weight_grad_plan, describe=_weight_grad_describe)
