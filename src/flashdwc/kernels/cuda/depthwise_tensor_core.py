"""Launches ``depthwise_conv.cu`` and ``depthwise_weight_grad.cu``: any kernel size, on tensor cores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._C._dynamo import guards

from ...core import jit
from ...core.backend import Plan
from .depthwise_problem import Problem, dense_layout, readable
from .depthwise_tiles import Tile, conv_macros, conv_tiles, grid, weight_grad_macros, weight_grad_tiles

empty_strided = guards._empty_strided_cuda  # type: ignore[attr-defined]  # on the current device; half the host time
TENSOR4 = "5q"  # struct Tensor4
MAX_BLOCKS = 2**31 - 1
SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}  # that a block may take; else 99


STATIC_BYTES = 128  # of it, at most, that the kernels take beside what a launch asks for


def shared_limit(device: torch.device) -> int:
    """Bytes that a launch may ask for."""
    return SHARED_KIB.get(torch.cuda.get_device_capability(device), 99) * 1024 - STATIC_BYTES


def why_no_tile(tile: Tile | None, problem: Problem, limit: int) -> str | None:
    if tile is None:
        return f"no tile of a {problem.vertical.k}x{problem.horizontal.k} kernel fits {-(-limit // 1024)} KiB of shared memory"
    if grid(problem, tile)[0] > MAX_BLOCKS:
        return "the grid would exceed 2^31 blocks"
    return None


TILES_TO_TRY = 6


def conv_layouts(problem: Problem, shared_limit: int) -> list[Tile]:
    """The likely fastest first."""
    return _launchable(problem, conv_tiles(problem.folded, shared_limit), shared_limit)


def weight_grad_layouts(problem: Problem, shared_limit: int) -> list[Tile]:
    return _launchable(problem, weight_grad_tiles(problem.folded, shared_limit), shared_limit)


def _launchable(problem: Problem, tiles: Sequence[Tile], shared_limit: int) -> list[Tile]:
    return [t for t in tiles[:TILES_TO_TRY] if why_no_tile(t, problem.folded, shared_limit) is None]


def describe(problem: Problem, tile: Tile) -> str:
    columns = tile.blocks * 8 * problem.horizontal.u
    size = f"{tile.channels} channels x {tile.images} images x {tile.out_rows} rows x {columns} columns"
    return f"tensor cores, tile {size}, {tile.warps} warps"


def plan_conv(
    problem: Problem,
    tile: Tile,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    macros, shared = conv_macros(problem.folded, tile)
    blocks, across, down, channel_blocks = grid(problem.folded, tile)
    numbers = problem.images, problem.channels, *conv_sizes(problem), across, down, channel_blocks
    shape = {"blocks": blocks, "threads": 32 * tile.warps, "shared_bytes": shared}
    return conv_plan("depthwise_conv", problem, macros, numbers, source, result_size, memory_format, rotate, **shape)


def conv_sizes(problem: Problem) -> tuple[int, int, int, int]:
    """Rows and columns of the source, then of the result."""
    vertical, horizontal = problem.vertical, problem.horizontal
    return vertical.size, horizontal.size, vertical.out, horizontal.out


def divisors(*numbers: int) -> list[int]:
    """Them as ``struct Divisor`` each, in signed 32-bit numbers."""

    def signed(n: int) -> int:
        return n - 2**32 if n >= 2**31 else n

    halves = ((n, *reversed(divmod(-(-(2**64) // n), 2**32))) for n in numbers)
    return [signed(half % 2**32) for three in halves for half in three]


def conv_plan(
    kernel: str,
    problem: Problem,
    macros: Mapping[str, int],
    numbers: Sequence[int],  # of the kernel's Params, behind tensors and pointers
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
    *,
    blocks: int,
    threads: int,
    shared_bytes: int = 0,
) -> Plan:
    """A kernel whose Params are source, result, weight, bias and numbers: the plan takes source, weight and perhaps a bias."""
    size = tuple(result_size)
    strides, _ = dense_layout(size, memory_format)
    v, h = problem.vertical, problem.horizontal
    used = {"WHOLE_KH": v.whole or v.k, "WHOLE_KW": h.whole or h.k, "SKIPPED_KH": v.skipped, "SKIPPED_KW": h.skipped}
    launch = jit.Launcher(
        kernel,
        {**macros, **used, "BF16": source.dtype is torch.bfloat16, "ROTATE": rotate, "SWAPPED": problem.swapped},
        source.device,
        blocks=blocks,
        threads=threads,
        shared_bytes=shared_bytes,
        layout=f"={TENSOR4}{TENSOR4}2q{len(numbers)}i",
        values=[0, *problem.in_order(readable(source).stride()), 0, *problem.in_order(strides), 0, 0, *numbers],
        pointers=(0, 5, 10, 11),
    )
    return conv_runner(launch, source, size, strides)


def conv_runner(launch: jit.Launcher, source: Tensor, size: tuple[int, ...], strides: tuple[int, ...]) -> Plan:
    index, dtype = source.device.index, source.dtype
    size, strides = tuple(size), tuple(strides)  # exactly tuples: torch.Size is refused by the allocation
    copies = readable(source) is not source

    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return run(x, w, b)
        if copies:
            x = readable(x)
        if not w.is_contiguous():
            w = w.contiguous()
        bias = 0
        if b is not None:
            b = b.contiguous()
            bias = b.data_ptr()
        y = empty_strided(size, strides, dtype)
        launch(x.data_ptr(), y.data_ptr(), w.data_ptr(), bias)
        return y

    return run


def plan_weight_grad(problem: Problem, tile: Tile, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    macros, shared = weight_grad_macros(problem.folded, tile)
    blocks, across, down, channel_blocks = grid(problem.folded, tile)
    tiles, height_blocks = blocks // channel_blocks, -(-problem.vertical.k // tile.chunk)
    columns = channel_blocks * height_blocks
    splits = choose_splits(x.device, columns, tiles, tile.per_sm)
    numbers = problem.images, problem.channels, *conv_sizes(problem), across, down, channel_blocks, height_blocks, tiles
    shape = {"blocks": columns * splits, "threads": 32 * tile.warps, "shared_bytes": shared}
    return weight_grad_plan(
        "depthwise_weight_grad", problem, macros, numbers, splits, dy, x, weight_size, weight_stride, **shape
    )


def choose_splits(device: torch.device, columns: int, tiles: int, resident: int, few: int = 2) -> int:
    """Parts of the sum over tiles that run side by side, so that the blocks fill the device evenly four times.

    ``few`` tiles are not worth the launch that adds their parts.
    """
    if tiles <= few:
        return 1
    slots = resident * torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(1, min(tiles, -(-4 * slots // columns), 4096))
    return -(-tiles // -(-tiles // wanted))  # as few as give each the same number of tiles


def shares(device: torch.device, steps: int, columns: int, resident: int = 1) -> tuple[int, int]:
    """Steps of a block, and blocks that share all steps: each of ``columns`` is shared by as many as fill the device once."""
    places = resident * torch.cuda.get_device_properties(device).multi_processor_count
    share = -(-steps // min(steps, max(1, places // columns)))
    return share, -(-steps // share)


def weight_grad_plan(
    kernel: str,
    problem: Problem,
    macros: Mapping[str, int],
    numbers: Sequence[int],  # of the kernel's Params, between the pointers and ``splits``
    splits: int,
    dy: Tensor,
    x: Tensor,
    weight_size: Sequence[int],
    weight_stride: Sequence[int],
    *,
    blocks: int,
    threads: int,
    shared_bytes: int = 0,
) -> Plan:
    """A kernel whose Params are x, dy, partial results, the result, numbers and splits, and the sum of its partial results."""
    device, dtype, index, in_order = x.device, x.dtype, x.device.index, problem.in_order
    launch = jit.Launcher(
        kernel,
        {**macros, "BF16": dtype is torch.bfloat16, "SWAPPED": problem.swapped},
        device,
        blocks=blocks,
        threads=threads,
        shared_bytes=shared_bytes,
        layout=f"={TENSOR4}{TENSOR4}2q{len(numbers) + 1}i",
        values=[0, *in_order(readable(x).stride()), 0, *in_order(readable(dy).stride()), 0, 0, *numbers, splits],
        pointers=(0, 5, 10, 11),
    )
    copies = readable(dy) is not dy or readable(x) is not x
    size, strides = tuple(weight_size), tuple(weight_stride)  # exactly tuples: torch.Size is refused by the allocation
    count = math.prod(size)
    reduce = None
    if splits > 1:
        reduce = jit.Launcher(
            "reduce_partials",
            {"BF16": dtype is torch.bfloat16},
            device,
            blocks=-(-count // 32),
            threads=256,
            shared_bytes=0,
            layout="=3qi",
            values=[0, 0, count, splits],
            pointers=(0, 1),
        )

    def run(dy: Tensor, x: Tensor) -> Tensor:
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return run(dy, x)
        if copies:
            dy, x = readable(dy), readable(x)
        dw = empty_strided(size, strides, dtype)
        if reduce is None:
            launch(x.data_ptr(), dy.data_ptr(), 0, dw.data_ptr())
            return dw
        partials = empty_strided((splits * count,), (1,), torch.float32)
        launch(x.data_ptr(), dy.data_ptr(), partials.data_ptr(), 0)
        reduce(partials.data_ptr(), dw.data_ptr())
        return dw

    return run
