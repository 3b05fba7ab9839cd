"""Launches ``depthwise_octets.cu`` and ``depthwise_octets_weight_grad.cu``: channels_last, small filters, on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import MULTIPROCESSORS, Axis, Problem
from .depthwise_tensor_core import conv_plan, conv_sizes, shares, weight_grad_plan
from .depthwise_tiles import leading_steps, round_up

CHANNELS, PIXEL_BYTES, WARPS = 64, 128, 8  # of a block: a line of memory of each pixel, a warp for each octet
SCRATCH_BYTES = WARPS * 2048  # for the sums of a weight gradient's filter row
REGISTERS = 208  # that operands may take; what else a thread needs then still fits 255
LARGEST_WEIGHT_GRAD = 13  # filter rows
# What follows was measured on an H200, over the layers of networks.
FEW_TAPS, SOME_TAPS = 9, 25
BUSY = 0.7  # of the channels of all blocks, at least


@dataclass(frozen=True)
class Octets:
    columns: int  # of a strip
    rows: int  # of each of the row groups that fill a warp's tile
    stages: int  # steps that copies are ahead
    height: int = 0  # filter rows of a block, in a weight gradient

    def out_rows(self, tile: int) -> int:
        """Of a step, where a tile is ``tile`` columns wide at most."""
        return max(1, tile // self.columns) * self.rows


CONV_TILE, WEIGHT_GRAD_TILE = 64, 32  # pixels of a row that an mma takes


@lru_cache(maxsize=4096)
def conv_octets(problem: Problem, shared_limit: int) -> Octets | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    h, taps = problem.horizontal, problem.taps
    if taps <= FEW_TAPS:
        suits = not problem.strided and problem.outputs >= 8_000_000 and h.out > 7
    elif taps <= SOME_TAPS:
        suits = problem.outputs >= 450_000
    else:
        suits = problem.outputs >= 4_000_000 and _busy(problem) > 0.8
    return next(iter(conv_layouts(problem, shared_limit)), None) if suits and _busy(problem) > BUSY else None


@lru_cache(maxsize=4096)
def weight_grad_octets(problem: Problem, shared_limit: int) -> Octets | None:
    """The layout of a weight gradient; None where other kernels are faster."""
    wide = problem.horizontal.out > 28
    few_of_wide = problem.taps <= FEW_TAPS and wide and _busy(problem) <= 0.8
    many_of_wide = problem.taps > 81 and wide
    suits = problem.outputs >= 4_000_000 and _busy(problem) > BUSY and not few_of_wide and not many_of_wide
    return next(iter(weight_grad_layouts(problem, shared_limit)), None) if suits else None


def conv_layouts(problem: Problem, shared_limit: int) -> list[Octets]:
    """Those that a problem allows, the likely fastest first."""
    v, h, fours = problem.vertical, problem.horizontal, _fours(problem)
    if not _covers(problem) or max(v.s, h.s) > 2:
        return []

    def fits(octets: Octets) -> bool:
        registers = 4 * v.k * fours + 16 * octets.rows + 8 * (fours + h.s)
        return _fits(octets.out_rows(CONV_TILE), registers, conv_macros(problem, octets)[1], shared_limit)

    columns = by_width(problem, (64, 32, 16, 8))
    choices = (Octets(c, rows, stages) for c in columns for rows in (4, 2, 1) for stages in (2, 1))
    return sorted(filter(fits, choices), key=lambda octets: max(MULTIPROCESSORS / _parts(problem, octets), 1))


def weight_grad_layouts(problem: Problem, shared_limit: int) -> list[Octets]:
    """Those that a problem allows, the likely fastest first."""
    v, h = problem.vertical, problem.horizontal
    if not _covers(problem) or problem.strided or h.span(h.k, 4) > 16 or v.k > LARGEST_WEIGHT_GRAD:
        return []
    height = v.k if v.k <= 9 else -(-v.k // 2)

    def fits(octets: Octets) -> bool:
        shared = weight_grad_macros(problem, octets)[1]
        registers = 16 * height + 8 * octets.rows + (24 if h.d == 1 else 72)
        return _fits(octets.out_rows(WEIGHT_GRAD_TILE), registers, shared, shared_limit)

    columns = by_width(problem, (64, 32, 16, 8))
    choices = (Octets(c, rows, stages, height) for rows in (8, 4, 2, 1) for c in columns for stages in (2, 1))
    return list(filter(fits, choices))


def _parts(problem: Problem, octets: Octets) -> int:
    """Blocks that have a step each."""
    steps_down, strips = _steps(problem, octets, octets.out_rows(CONV_TILE))
    return -(-problem.channels // CHANNELS) * steps_down * strips


def _steps(problem: Problem, octets: Octets, out_rows: int) -> tuple[int, int]:
    """Down the column of all images, and across."""
    rows = (problem.images - 1) * period_of(problem.vertical) + problem.vertical.out
    return -(-rows // out_rows), -(-problem.horizontal.out // octets.columns)


def _busy(problem: Problem) -> float:
    return problem.channels / round_up(problem.channels, CHANNELS)


def _covers(problem: Problem) -> bool:
    plain = problem.vertical.u * problem.horizontal.u * problem.spread * problem.sum == 1
    rows = problem.images * period_of(problem.vertical) * problem.vertical.s  # that 32 bits count
    return plain and problem.by_octets and problem.taps > 1 and rows < 2**31


def by_width(problem: Problem, choices: Sequence[int]) -> list[int]:
    """The two best of columns of a strip, by those that are loaded."""
    return sorted(choices, key=lambda c: -(-problem.horizontal.out // c) * (c + 8))[:2]


def _fits(out_rows: int, registers: int, shared_bytes: int, shared_limit: int) -> bool:
    shares_warps = WARPS % out_rows == 0 or out_rows % WARPS == 0
    return shares_warps and registers <= REGISTERS and shared_bytes <= shared_limit - 4 * CHANNELS


def _fours(problem: Problem) -> int:
    """Of pixels, that the window of four outputs spans."""
    return -(-problem.horizontal.span(problem.horizontal.k, 4) // 4)


def conv_macros(problem: Problem, octets: Octets) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_octets.cu`` and the shared memory in bytes."""
    v, h, fours = problem.vertical, problem.horizontal, _fours(problem)
    out_rows = octets.out_rows(CONV_TILE)
    pixels, slot_rows = (octets.columns - 8) * h.s + 4 * (fours + h.s), out_rows * v.s
    slots = leading_steps((v.k - 1) * v.d + 1 - v.s, slot_rows) + 1 + octets.stages
    macros = {
        **_macros(problem, octets), "SH": v.s, "SW": h.s, "UH": 1, "UW": 1, "SPREAD": 1, "SUM": 1,
    }  # fmt: skip
    return macros, PIXEL_BYTES * (slots * slot_rows * pixels + 2 * out_rows * octets.columns)


def weight_grad_macros(problem: Problem, octets: Octets) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_octets_weight_grad.cu`` and the shared memory in bytes."""
    v, h, rows = problem.vertical, problem.horizontal, octets.out_rows(WEIGHT_GRAD_TILE)
    pixels = octets.columns + (12 if h.span(h.k, 4) > 8 else 4)
    slots = leading_steps((octets.height - 1) * v.d, rows) + 1 + octets.stages
    rings = rows * (slots * pixels + (1 + octets.stages) * octets.columns)
    macros = {**_macros(problem, octets), "GROUPS": rows // octets.rows, "HEIGHT": octets.height}
    return macros, max(PIXEL_BYTES * rings, SCRATCH_BYTES)


def _macros(problem: Problem, octets: Octets) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "KH": v.k, "KW": h.k, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "COLUMNS": octets.columns,
        "ROWS": octets.rows, "STAGES": octets.stages, "THREADS": 32 * WARPS,
    }  # fmt: skip


def describe(problem: Problem, octets: Octets) -> str:
    rows = octets.out_rows(WEIGHT_GRAD_TILE if octets.height else CONV_TILE)
    size = f"{CHANNELS} channels x {rows} rows x {octets.columns} columns"
    return f"tensor cores, octets of channels, in steps of {size}"


def period_of(v: Axis) -> int:
    """Output rows from one image to the next in the column of all images."""
    below = -(-((v.k - 1) * v.d + 1 - v.s - v.p) // v.s)  # rows that the last outputs reach behind their own
    return max(-(-(v.size + max(v.p, 0)) // v.s), v.out + max(below, 0))


def _course(
    problem: Problem, octets: Octets, out_rows: int, filter_parts: int, device: torch.device
) -> tuple[int, int, list[int]]:
    """All blocks, those that share the steps of some channels and filter rows, and the kernel's sizes."""
    channel_blocks = -(-problem.channels // CHANNELS)
    steps_down, strips = _steps(problem, octets, out_rows)
    steps = steps_down * strips
    share, splits = shares(device, steps, channel_blocks * filter_parts)
    sizes = [problem.images, problem.channels, *conv_sizes(problem), period_of(problem.vertical)]
    return channel_blocks * filter_parts * splits, splits, [*sizes, steps_down, strips, channel_blocks, steps, share]


def plan_conv(
    problem: Problem,
    octets: Octets,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    macros, shared = conv_macros(problem, octets)
    blocks, _, sizes = _course(problem, octets, octets.out_rows(CONV_TILE), 1, source.device)
    shape = {"blocks": blocks, "threads": 32 * WARPS, "shared_bytes": shared}
    return conv_plan("depthwise_octets", problem, macros, sizes, source, result_size, memory_format, rotate, **shape)


def plan_weight_grad(problem: Problem, octets: Octets, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    macros, shared = weight_grad_macros(problem, octets)
    filter_parts = -(-problem.vertical.k // octets.height)
    blocks, splits, sizes = _course(problem, octets, octets.out_rows(WEIGHT_GRAD_TILE), filter_parts, x.device)
    shape = {"blocks": blocks, "threads": 32 * WARPS, "shared_bytes": shared}
    numbers, kernel = [*sizes, filter_parts], "depthwise_octets_weight_grad"
    return weight_grad_plan(kernel, problem, macros, numbers, splits, dy, x, weight_size, weight_stride, **shape)
