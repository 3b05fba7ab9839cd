"""Launches ``depthwise_planar.cu``: few taps of stride 1, contiguous, on CUDA cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import Problem
from .depthwise_tensor_core import conv_plan, conv_sizes

THREADS = 256
ENOUGH_BLOCKS = 8  # for each multiprocessor
ENOUGH_THREADS = 67_000  # twice the threads of a wave on the largest cards
FEW_TAPS, MAX_TAPS = 12, 25
SMALL = 4_000_000  # outputs: below, starting costs more than multiplying


@dataclass(frozen=True)
class Strip:
    rows: int  # of 8 columns each, that a thread takes at a time
    lanes: int  # threads of a plane


def conv_strip(problem: Problem) -> Strip:
    planes = problem.images * problem.channels
    choices = (4, 2, 1) if problem.taps <= FEW_TAPS or problem.inner.vector > 1 else (2, 1)
    fitting = (rows for rows in choices if planes * _strips(problem, rows)[1] >= ENOUGH_THREADS)
    rows = 1 if problem.vertical.out == 1 else next(fitting, 1)
    return Strip(rows, min(THREADS, 1 << (_strips(problem, rows)[1] - 1).bit_length()))


def suits(problem: Problem) -> bool:
    """Whether the kernel covers a problem and is the fastest (measured on an H200)."""
    v, h = problem.vertical, problem.horizontal
    reach = 0 <= h.p <= 8 and (h.k - 1) * h.d - h.p <= 8
    plain = max(v.s, h.s, v.u, h.u, problem.spread, problem.sum) == 1 and not problem.linear
    planar = not problem.inner.nhwc and not problem.outer.nhwc
    few = problem.taps <= FEW_TAPS or (problem.taps <= MAX_TAPS and problem.outputs <= SMALL)
    few_planes = problem.images * problem.channels < 2**31
    return planar and plain and reach and few and few_planes and 0 < problem.outputs < 2**33


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
        "KH": v.k, "KW": h.k, "SH": 1, "SW": 1, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "UH": 1, "UW": 1,
        "SUM": 1, "SPREAD": 1, "ROWS": strip.rows, "LANES": strip.lanes, "THREADS": THREADS,
    }  # fmt: skip


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
