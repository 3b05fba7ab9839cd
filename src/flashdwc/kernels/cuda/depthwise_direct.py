"""Launches ``depthwise_direct.cu`` and ``depthwise_direct_weight_grad.cu``: few taps, channels_last, on CUDA cores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import MULTIPROCESSORS, Problem
from .depthwise_tensor_core import choose_splits, conv_plan, conv_sizes, weight_grad_plan

MAX_TAPS, FEW_TAPS = 25, 12
FEW_STRIPS = 2  # that a thread had better take one after the other than share with others
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


# Strips (channels, rows, columns) from large to small: a small problem takes one that leaves enough threads.
CONV_STRIPS = ((4, 4, 4), (4, 2, 2), (2, 2, 2))
MANY_TAPS_CONV_STRIPS = ((2, 4, 4), (2, 2, 4), (2, 2, 2))
ENOUGH_THREADS = 67_000  # twice the threads of a wave on the largest cards
ENOUGH_OUTPUTS = 1_000_000  # for the wide strips of weight gradients


def conv_strip(problem: Problem) -> Strip:
    choices = CONV_STRIPS if problem.taps <= FEW_TAPS else MANY_TAPS_CONV_STRIPS
    widest = min(problem.inner.vector, problem.outer.vector)
    fitting = [s for s in choices if s[0] <= widest] or [(1, 4, 4), (1, 2, 4)]
    strip = next((s for s in fitting if problem.outputs >= ENOUGH_THREADS * s[0] * s[1] * s[2]), fitting[-1])
    return _share(problem, Strip(*strip, lanes=1, threads=128), range(1, 65))


def weight_grad_strip(problem: Problem) -> Strip:
    vector, rows, columns = (4, 2, 4) if problem.taps <= FEW_TAPS else (2, 4, 4)
    if problem.outputs < ENOUGH_OUTPUTS and problem.taps <= FEW_TAPS:
        vector = 2
    vector = min(vector, problem.inner.vector, problem.outer.vector)
    rows = min(rows, 2) if vector == 1 else rows
    strip = Strip(vector, rows, columns, lanes=1, threads=256, height=problem.vertical.k)
    # a small map in one launch: where the channels suffice, a block for each multiprocessor sees to all strips of its channels
    share = -(-problem.channels // vector) // MULTIPROCESSORS
    small = replace(strip, lanes=max(2, 1 << max(0, share.bit_length() - 1)) if share else 1)
    threads = _strip_grid(problem, small)[0] * small.lanes
    few = problem.taps <= FEW_TAPS
    if small.lanes <= 32 and (threads <= 512 if share else few and threads <= 256):
        return replace(small, threads=min(512 if few and vector <= 2 else 256, -(-threads // 32) * 32))
    return _share(problem, strip, (1, 2, 4, 8, 16, 32))


def _share(problem: Problem, strip: Strip, choices: Iterable[int]) -> Strip:
    """Shares the threads of a block so that few idle and neighbours read whole sectors, better whole lines, of memory."""
    groups = -(-problem.channels // strip.vector)

    def use(lanes: int) -> float:
        busy = groups / (-(-groups // lanes) * lanes) * (strip.threads // lanes * lanes / strip.threads)
        read = 2 * strip.vector * lanes if lanes < groups else 128  # whole pixels are neighbours
        narrow = 0.85 if problem.taps <= FEW_TAPS else 1.0
        return busy * (1.0 if read >= 128 else 0.99 if read >= 64 else narrow if read >= 32 else 0.8)

    return replace(strip, lanes=max((n for n in choices if n <= groups), key=use))


def describe(problem: Problem, strip: Strip) -> str:
    return f"CUDA cores, {strip.vector} channels x {strip.rows} rows x {strip.columns} columns a thread"


def weight_grad_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "SUM": 1, "SPREAD": 1,
        "VEC": strip.vector, "ROWS": strip.rows, "COLUMNS": strip.columns, "LANES": strip.lanes, "THREADS": strip.threads,
        "HEIGHT": strip.height,
    }  # fmt: skip


def conv_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    one_strip_a_thread = (strip.rows, strip.columns) == CONV_STRIPS[-1][1:]
    upsampling = {"UH": v.u, "UW": h.u, "PHASE_H": v.phase, "PHASE_W": h.phase, "FIRST_H": v.first, "FIRST_W": h.first}
    return {**weight_grad_macros(problem, strip), **upsampling, "STAGED": not one_strip_a_thread}


def _strip_grid(problem: Problem, strip: Strip) -> tuple[int, int, int, int]:
    """All strips, strips across, strips down, blocks of channels."""
    across, down = -(-problem.horizontal.out // strip.columns), -(-problem.vertical.out // strip.rows)
    channel_blocks = -(-problem.channels // (strip.lanes * strip.vector))
    return problem.images * across * down, across, down, channel_blocks


def plan_conv(
    problem: Problem, source: Tensor, result_size: Sequence[int], memory_format: torch.memory_format, rotate: bool
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    strip = conv_strip(problem)
    strips, across, down, channel_blocks = _strip_grid(problem, strip)
    numbers = strips, problem.channels, *conv_sizes(problem), across, down, channel_blocks
    blocks = channel_blocks * _strip_blocks(source.device, channel_blocks, -(-strips // strip.strips))
    shape = {"blocks": blocks, "threads": strip.threads}
    macros = conv_macros(problem, strip)
    return conv_plan("depthwise_direct", macros, numbers, source, result_size, memory_format, rotate, **shape)


def _strip_blocks(device: torch.device, channel_blocks: int, groups: int) -> int:
    slots = BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(groups, -(-slots // channel_blocks)))


def plan_weight_grad(problem: Problem, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    strip = weight_grad_strip(problem)
    strips, across, down, channel_blocks = _strip_grid(problem, strip)
    columns = channel_blocks * (problem.vertical.k // strip.height)
    splits = choose_splits(x.device, columns, -(-strips // strip.strips), resident=1, few=FEW_STRIPS)
    numbers = strips, problem.channels, *conv_sizes(problem), across, down, channel_blocks
    macros, shape = weight_grad_macros(problem, strip), {"blocks": columns * splits, "threads": strip.threads}
    kernel = "depthwise_direct_weight_grad"
    return weight_grad_plan(kernel, macros, numbers, splits, dy, x, weight_size, weight_stride, **shape)
