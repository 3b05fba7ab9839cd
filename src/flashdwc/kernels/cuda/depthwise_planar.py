"""Launches ``depthwise_planar.cu`` and ``depthwise_planar_weight_grad.cu``: few taps, contiguous, on CUDA cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import Problem
from .depthwise_tensor_core import choose_splits, conv_plan, conv_sizes, weight_grad_plan

THREADS = 256
FEW_STRIPS = 4  # that a thread had better take one after the other than share with others
ENOUGH_BLOCKS = 8  # for each multiprocessor
ENOUGH_THREADS = 67_000  # twice the threads of a wave on the largest cards
FEW_TAPS, MAX_TAPS, MAX_NARROW_TAPS = 12, 25, 49
SMALL = 4_000_000  # outputs: below, starting costs more than multiplying


@dataclass(frozen=True)
class Strip:
    rows: int  # of 8 columns each, that a thread takes at a time
    lanes: int  # threads of a plane
    height: int = 1  # filter rows of a block, for weight gradients


def conv_strip(problem: Problem) -> Strip:
    planes = problem.images * problem.channels
    choices = (4, 2, 1) if problem.taps <= FEW_TAPS or problem.inner.vector > 1 else (2, 1)
    fitting = (rows for rows in choices if planes * _strips(problem, rows)[1] >= ENOUGH_THREADS)
    rows = 1 if problem.vertical.out == 1 else next(fitting, 1)
    return Strip(rows, min(THREADS, 1 << (_strips(problem, rows)[1] - 1).bit_length()))


def suits(problem: Problem) -> bool:
    """Whether the kernel covers a problem and is the fastest (measured on an H200)."""
    v, h = problem.vertical, problem.horizontal
    reach = _narrow(problem) or (0 <= h.p <= 8 and (h.k - 1) * h.d - h.p - (h.s - 1) <= 8)
    plain = max(v.u, h.u, problem.spread, problem.sum) == 1 and max(v.s, h.s) <= 2 and not problem.linear
    planar = not problem.inner.nhwc and not problem.outer.nhwc
    most = MAX_NARROW_TAPS if _narrow(problem) else MAX_TAPS
    few = problem.taps <= FEW_TAPS or (problem.taps <= most and problem.outputs <= SMALL)
    few_planes = problem.images * problem.channels < 2**31
    return planar and plain and reach and few and few_planes and 0 < problem.outputs < 2**33


def _narrow(problem: Problem) -> bool:
    """Whether one strip spans a plane, so that nothing lies beyond its columns."""
    h = problem.horizontal
    return h.size <= 8 * h.s and h.out <= 8


def weight_grad_strip(problem: Problem) -> Strip:
    all_strips = problem.images * _strips(problem, 1)[1]
    lanes = min(THREADS, 1 << (all_strips - 1).bit_length())
    return Strip(1, lanes, problem.vertical.k if problem.taps <= FEW_TAPS else 1)


def describe(problem: Problem, strip: Strip) -> str:
    return f"CUDA cores, {strip.rows} rows x 8 columns of a plane a thread"


def _strips(problem: Problem, rows: int) -> tuple[int, int]:
    """Strips across a plane, all strips of a plane."""
    across = -(-problem.horizontal.out // 8)
    return across, across * -(-problem.vertical.out // rows)


def conv_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "IN_VEC": problem.inner.vector, "OUT_VEC": problem.outer.vector,
        "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "UH": 1, "UW": 1,
        "SUM": 1, "SPREAD": 1, "NARROW": _narrow(problem), "ROWS": strip.rows, "LANES": strip.lanes, "THREADS": THREADS,
    }  # fmt: skip


def weight_grad_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    return {**conv_macros(problem, strip), "HEIGHT": strip.height}


def plan_conv(
    problem: Problem, source: Tensor, result_size: Sequence[int], memory_format: torch.memory_format, rotate: bool
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    strip = conv_strip(problem)
    across, strips = _strips(problem, strip.rows)
    planes = problem.images * problem.channels
    groups = -(-planes // (THREADS // strip.lanes))
    wanted = ENOUGH_BLOCKS * torch.cuda.get_device_properties(source.device).multi_processor_count
    parts = max(1, min(-(-strips // strip.lanes), -(-wanted // groups)))
    numbers = planes, problem.channels, *conv_sizes(problem), across, strips, parts
    shape = {"blocks": groups * parts, "threads": THREADS}
    macros = conv_macros(problem, strip)
    return conv_plan("depthwise_planar", macros, numbers, source, result_size, memory_format, rotate, **shape)


def plan_weight_grad(problem: Problem, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    strip = weight_grad_strip(problem)
    across, strips = _strips(problem, strip.rows)
    all_strips, channel_blocks = problem.images * strips, -(-problem.channels // (THREADS // strip.lanes))
    columns = channel_blocks * (problem.vertical.k // strip.height)
    splits = choose_splits(x.device, columns, -(-all_strips // strip.lanes), resident=2, few=FEW_STRIPS)
    numbers = problem.channels, *conv_sizes(problem), across, strips, all_strips, channel_blocks
    macros, shape = weight_grad_macros(problem, strip), {"blocks": columns * splits, "threads": THREADS}
    kernel = "depthwise_planar_weight_grad"
    return weight_grad_plan(kernel, macros, numbers, splits, dy, x, weight_size, weight_stride, **shape)
