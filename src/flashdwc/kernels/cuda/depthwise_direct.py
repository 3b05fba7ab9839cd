"""Launches ``depthwise_direct.cu`` and ``depthwise_direct_weight_grad.cu``: few taps, channels_last, on CUDA cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core import jit
from ...core.backend import Plan
from .depthwise_problem import Problem, dense_layout, readable
from .depthwise_tensor_core import TENSOR4, choose_splits, conv_runner, weight_grad_runner

MAX_TAPS = 25
MULTIPROCESSORS = 132  # of the cards that the rules below were measured on
BLOCKS_PER_SM = 8  # persistent blocks; enough to even out their ends


@dataclass(frozen=True)
class Strip:
    """What a thread takes at a time, and how the threads of a block share the channels."""

    vector: int  # channels
    rows: int
    columns: int
    lanes: int  # channel groups of a block
    threads: int

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


# Strips from large to small (channels, rows, columns): a small problem takes one that leaves enough threads.
STRIPS = ((4, 4, 4), (2, 4, 4), (2, 2, 4), (2, 2, 2))
ENOUGH_THREADS = 67_000  # twice the threads of a wave on the largest cards
ENOUGH_WEIGHT_GRAD_THREADS = 11_000  # their sums are to be added, so fewer are better


def conv_strip(problem: Problem) -> Strip:
    return _strip(problem, ENOUGH_THREADS)


def weight_grad_strip(problem: Problem) -> Strip:
    strip = _strip(problem, ENOUGH_WEIGHT_GRAD_THREADS)
    groups = -(-problem.channels // strip.vector)
    wide = _with_lanes(problem, strip.vector, strip.rows, strip.columns, strip.threads, (1, 2, 4, 8, 16, 32))
    # a small problem in one launch: blocks of few channels, one for each multiprocessor, whose threads see to all strips
    lanes = max(1, _power_of_two_below(groups // MULTIPROCESSORS)) if groups > MULTIPROCESSORS else 1
    strips = _strip_grid(problem, strip)[0]
    threads = min(512 if problem.taps <= 12 else 256, max(32, -(-strips * lanes // 32) * 32))
    return replace(wide, lanes=lanes, threads=threads) if strips * lanes <= 2 * threads and lanes <= 32 else wide


def _power_of_two_below(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _strip(problem: Problem, enough: int) -> Strip:
    widest = min(problem.inner.vector, problem.outer.vector, 4 if problem.taps <= 12 else 2)
    outputs = problem.images * problem.channels * problem.vertical.out * problem.horizontal.out
    fitting = [s for s in STRIPS if s[0] <= widest] or [(1, *s[1:]) for s in STRIPS[1:]]
    chosen = next((s for s in fitting if outputs >= enough * s[0] * s[1] * s[2]), fitting[-1])
    groups = -(-problem.channels // chosen[0])
    return _with_lanes(problem, *chosen, 128, range(1, min(groups, 64) + 1))


def _with_lanes(
    problem: Problem, vector: int, rows: int, columns: int, threads: int, choices: Sequence[int]
) -> Strip:
    """Shares the threads of a block so that few idle and neighbours read whole lines of 128 bytes."""
    groups = -(-problem.channels // vector)

    def use(lanes: int) -> float:
        busy = groups / (-(-groups // lanes) * lanes) * (threads // lanes * lanes / threads)
        read = 2 * vector * lanes
        return busy * (1.0 if read >= 128 else 0.97 if read >= 64 or lanes == groups else 0.8)

    return Strip(vector, rows, columns, max(choices, key=use), threads)


def describe(problem: Problem, strip: Strip) -> str:
    return f"CUDA cores, {strip.vector} channels x {strip.rows} rows x {strip.columns} columns a thread"


def _macros(problem: Problem, strip: Strip, dtype: torch.dtype) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "SUM": 1, "SPREAD": 1,
        "VEC": strip.vector, "ROWS": strip.rows, "COLUMNS": strip.columns, "LANES": strip.lanes, "THREADS": strip.threads,
        "BF16": dtype is torch.bfloat16,
    }  # fmt: skip


def conv_macros(problem: Problem, strip: Strip, dtype: torch.dtype, rotate: bool) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    staged = (strip.rows, strip.columns) != STRIPS[-1][1:]  # the smallest strips are for problems of one strip a thread
    upsampling = {"UH": v.u, "UW": h.u, "PHASE_H": v.phase, "PHASE_W": h.phase, "FIRST_H": v.first, "FIRST_W": h.first}
    return {**_macros(problem, strip, dtype), **upsampling, "ROTATE": rotate, "STAGED": staged}


def weight_grad_macros(problem: Problem, strip: Strip, dtype: torch.dtype) -> dict[str, int]:
    return _macros(problem, strip, dtype)


def _strip_grid(problem: Problem, strip: Strip) -> tuple[int, int, int, int]:
    """All strips, strips across, strips down, blocks of channels."""
    across, down = -(-problem.horizontal.out // strip.columns), -(-problem.vertical.out // strip.rows)
    channel_blocks = -(-problem.channels // (strip.lanes * strip.vector))
    return problem.images * across * down, across, down, channel_blocks


def plan_conv(
    problem: Problem, source: Tensor, result_size: Sequence[int], memory_format: torch.memory_format, rotate: bool
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    device = source.device
    size = tuple(result_size)
    strides, _ = dense_layout(size, memory_format)
    strip = conv_strip(problem)
    strips, across, down, channel_blocks = _strip_grid(problem, strip)
    vertical, horizontal = problem.vertical, problem.horizontal
    launch = jit.Launcher(
        "depthwise_direct",
        conv_macros(problem, strip, source.dtype, rotate),
        device,
        blocks=channel_blocks * _strip_blocks(device, channel_blocks, -(-strips // strip.strips)),
        threads=strip.threads,
        shared_bytes=0,
        layout=f"={TENSOR4}{TENSOR4}2q9i",
        values=[0, *readable(source).stride(), 0, *strides, 0, 0, strips, problem.channels, vertical.size, horizontal.size,
                vertical.out, horizontal.out, across, down, channel_blocks],
        pointers=(0, 5, 10, 11),
    )  # fmt: skip
    return conv_runner(launch, source, size, strides)


def _strip_blocks(device: torch.device, channel_blocks: int, groups: int) -> int:
    slots = BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(groups, -(-slots // channel_blocks)))


def plan_weight_grad(problem: Problem, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    device = x.device
    strip = weight_grad_strip(problem)
    strips, across, down, channel_blocks = _strip_grid(problem, strip)
    splits = choose_splits(device, channel_blocks, -(-strips // strip.strips), resident=1)
    vertical, horizontal = problem.vertical, problem.horizontal
    launch = jit.Launcher(
        "depthwise_direct_weight_grad",
        weight_grad_macros(problem, strip, x.dtype),
        device,
        blocks=channel_blocks * splits,
        threads=strip.threads,
        shared_bytes=0,
        layout=f"={TENSOR4}{TENSOR4}2q10i",
        values=[0, *readable(x).stride(), 0, *readable(dy).stride(), 0, 0, strips, problem.channels, vertical.size,
                horizontal.size, vertical.out, horizontal.out, across, down, channel_blocks, splits],
        pointers=(0, 5, 10, 11),
    )  # fmt: skip
    return weight_grad_runner(launch, splits, dy, x, weight_size, weight_stride)
