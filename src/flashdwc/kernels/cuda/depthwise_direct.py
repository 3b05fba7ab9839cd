"""Launches ``depthwise_direct.cu`` and ``depthwise_direct_weight_grad.cu``: few taps, channels_last, on CUDA cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import MULTIPROCESSORS, Problem
from .depthwise_tensor_core import choose_splits, conv_plan, conv_sizes, divisors, weight_grad_plan
from .depthwise_tiles import power_of_two

MAX_TAPS, FEW_TAPS = 25, 12
BLOCKS_PER_SM = 8  # persistent blocks; enough to even out their ends


@dataclass(frozen=True)
class Strip:
    """What a thread takes at a time, and how the threads of a block share the channels."""

    vector: int  # channels
    rows: int
    columns: int
    lanes: int  # channel groups of a block
    threads: int
    height: int = 1  # filter rows of a block, for weight gradients

    @property
    def strips(self) -> int:
        return self.threads // self.lanes


def why_not(problem: Problem) -> str | None:
    """Why the direct kernels do not cover a problem; None if they do."""
    if problem.taps > MAX_TAPS:
        return f"more than {MAX_TAPS} taps"
    if not (problem.inner.nhwc and problem.outer.nhwc):
        return "not channels_last"
    if problem.spread > 1 or problem.sum > 1:
        return "a channel multiplier"
    if problem.vertical.u > 2 or problem.horizontal.u > 2:
        return "an input gradient of stride above 2"
    if problem.images * problem.vertical.out * problem.horizontal.out >= 2**31:
        return "more than 2^31 pixels"
    return None


# The choices below were measured on an H200, over some hundred layers of networks. Strips: channels, rows, columns.
CONV_STRIPS = {800_000: (4, 2, 4), 48_000: (2, 2, 2), 0: (1, 1, 2)}  # from so many outputs on
MANY_TAPS_CONV_STRIPS = {480_000: (2, 4, 4), 160_000: (2, 2, 4), 90_000: (2, 2, 2), 0: (1, 1, 2)}
NARROW_CONV_STRIPS = {240_000: (1, 4, 4), 0: (1, 2, 2)}
WEIGHT_GRAD_STRIP, STRIDED_WEIGHT_GRAD_STRIP = (4, 2, 4), (2, 2, 2)
# With a filter row a block, of at most so many taps: more take more registers. Maps are 7, 14, 28 and 56 wide.
SMALL_WEIGHT_GRAD_STRIPS = {1: (4, 4, 4), 5: (4, 1, 7), 12: (2, 1, 7), MAX_TAPS: (2, 1, 4)}
ENOUGH_OUTPUTS = 4_500_000  # for the strips of weight gradients that take all filter rows
FEW_STRIPS = 256  # of all images, that are worth one launch
ENOUGH_BLOCKS = MULTIPROCESSORS // 4  # for one launch


def conv_strip(problem: Problem) -> Strip:
    fitting = _fitting(problem, CONV_STRIPS if problem.taps <= FEW_TAPS else MANY_TAPS_CONV_STRIPS)
    strip = next((strip for least, strip in fitting if problem.outputs >= least), fitting[-1][1])
    return _share(problem, Strip(*strip, lanes=1, threads=128))


def conv_layouts(problem: Problem, shared_limit: int) -> list[Strip]:
    """Those that a problem allows."""
    if why_not(problem) is not None:
        return []
    fitting = _fitting(problem, CONV_STRIPS) + _fitting(problem, MANY_TAPS_CONV_STRIPS)
    strips = dict.fromkeys(strip for _, strip in fitting)
    return [_share(problem, Strip(*strip, lanes=1, threads=128)) for strip in strips]


def _fitting(problem: Problem, choices: dict[int, tuple[int, int, int]]) -> list[tuple[int, tuple[int, int, int]]]:
    """Those that a problem allows; where a thread can have one channel only, of others."""
    v, h, widest = problem.vertical, problem.horizontal, min(problem.inner.vector, problem.outer.vector)
    choices = choices if widest > 1 else NARROW_CONV_STRIPS
    return [(n, s) for n, s in choices.items() if s[0] <= widest and s[1] % v.u == 0 and s[2] % h.u == 0]


def weight_grad_layouts(problem: Problem, shared_limit: int) -> list[Strip]:
    return [] if why_not(problem) is not None else [weight_grad_strip(problem)]


def _share(problem: Problem, strip: Strip) -> Strip:
    """Shares the threads of a block so that few idle and neighbours read whole sectors, better whole lines, of memory."""
    groups = -(-problem.channels // strip.vector)

    def use(lanes: int) -> float:
        busy = groups / (-(-groups // lanes) * lanes) * (strip.threads // lanes * lanes / strip.threads)
        read = 2 * strip.vector * lanes
        if lanes == groups:  # whole pixels are neighbours
            return busy
        sectors = read / (-(-read // 32) * 32) if read < 32 else 1.0 if read % 32 == 0 else 0.94
        return busy * sectors * (1.0 if read >= 128 else 0.93 if read >= 64 else 0.86)

    return replace(strip, lanes=max(range(1, min(groups, 64) + 1), key=use))


def weight_grad_strip(problem: Problem) -> Strip:
    widest, wide = min(problem.inner.vector, problem.outer.vector), problem.horizontal.k
    (vector, rows, columns), height = _weight_grad_shape(problem)
    vector = min(vector, widest)
    groups = -(-problem.channels // vector)
    lanes = min(32 // vector if vector > 1 else 16, power_of_two(groups))  # half a line of memory
    strip = Strip(vector, rows, columns, lanes, 256, height)
    strips = _strip_grid(problem, strip)[0]
    if strips > FEW_STRIPS:
        return strip
    while strip.lanes > 1 and (
        _weight_grad_columns(problem, strip) < ENOUGH_BLOCKS or strips * strip.lanes > 4 * FEW_STRIPS
    ):
        strip = replace(strip, lanes=strip.lanes // 2)
    crowded = wide <= 5 and strips * strip.lanes > 256 and _weight_grad_columns(problem, strip) < MULTIPROCESSORS
    return replace(strip, threads=512 if crowded else 256)


def _weight_grad_shape(problem: Problem) -> tuple[tuple[int, int, int], int]:
    """Channels, rows and columns of a strip; filter rows of a block."""
    height, wide = problem.vertical.k, problem.horizontal.k
    if problem.inner.vector == 1 or problem.outer.vector == 1:
        return (1, 4, 4), height
    if problem.outputs <= ENOUGH_OUTPUTS:
        return next(strip for most, strip in SMALL_WEIGHT_GRAD_STRIPS.items() if wide <= most), 1
    return (STRIDED_WEIGHT_GRAD_STRIP if problem.strided or problem.taps > FEW_TAPS else WEIGHT_GRAD_STRIP), height


def _weight_grad_columns(problem: Problem, strip: Strip) -> int:
    """Blocks that have no sum in common."""
    return _strip_grid(problem, strip)[3] * (problem.vertical.k // strip.height)


def describe(problem: Problem, strip: Strip) -> str:
    return f"CUDA cores, {strip.vector} channels x {strip.rows} rows x {strip.columns} columns a thread"


def _common_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "SUM": 1, "SPREAD": 1,
        "VEC": strip.vector, "ROWS": strip.rows, "COLUMNS": strip.columns, "LANES": strip.lanes, "THREADS": strip.threads,
    }  # fmt: skip


def weight_grad_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    return {
        **_common_macros(problem, strip),
        "HEIGHT": strip.height,
        "AHEAD": problem.horizontal.k == strip.height == 1,
    }


def conv_macros(problem: Problem, strip: Strip, once: bool) -> dict[str, int]:
    """``once``: does a thread have one strip at most?"""
    v, h = problem.vertical, problem.horizontal
    upsampling = {"UH": v.u, "UW": h.u, "PHASE_H": v.phase, "PHASE_W": h.phase, "FIRST_H": v.first, "FIRST_W": h.first}
    return {**_common_macros(problem, strip), **upsampling, "ONCE": once}


def _strip_grid(problem: Problem, strip: Strip) -> tuple[int, int, int, int]:
    """All strips, strips across, strips down, blocks of channels."""
    across, down = -(-problem.horizontal.out // strip.columns), -(-problem.vertical.out // strip.rows)
    channel_blocks = -(-problem.channels // (strip.lanes * strip.vector))
    return problem.images * across * down, across, down, channel_blocks


def plan_conv(
    problem: Problem,
    strip: Strip,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    strips, across, down, channel_blocks = _strip_grid(problem, strip)
    groups = -(-strips // strip.strips)
    blocks = _strip_blocks(source.device, channel_blocks, groups)  # of the same channels
    step = blocks * strip.strips
    numbers = strips, problem.channels, *conv_sizes(problem), step, *divisors(across, down, channel_blocks)
    shape = {"blocks": channel_blocks * blocks, "threads": strip.threads}
    many_registers = strip.vector == 4 and max(problem.vertical.u, problem.horizontal.u) > 1
    macros = conv_macros(problem, strip, blocks == groups and not many_registers)
    return conv_plan("depthwise_direct", problem, macros, numbers, source, result_size, memory_format, rotate, **shape)


def _strip_blocks(device: torch.device, channel_blocks: int, groups: int) -> int:
    slots = BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(groups, -(-slots // channel_blocks)))


def plan_weight_grad(problem: Problem, strip: Strip, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    strips, across, down, channel_blocks = _strip_grid(problem, strip)
    columns = _weight_grad_columns(problem, strip)
    groups_of_strips = -(-strips // strip.strips)
    splits = 1 if strips <= FEW_STRIPS else choose_splits(x.device, columns, groups_of_strips, resident=1)
    numbers = strips, problem.channels, *conv_sizes(problem), across, down, channel_blocks
    macros = weight_grad_macros(problem, strip)
    shape = {"blocks": columns * splits, "threads": strip.threads}
    kernel = "depthwise_direct_weight_grad"
    return weight_grad_plan(kernel, problem, macros, numbers, splits, dy, x, weight_size, weight_stride, **shape)
