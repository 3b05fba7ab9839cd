"""Launches ``depthwise_pairs.cu``: small filters of stride 1 in channels_last, on tensor cores, with nothing transposed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import Problem
from .depthwise_stream import ENOUGH_OUTPUTS, describe_steps, plan_strips
from .depthwise_tiles import leading_steps, round_up

SIDES = range(3, 6)  # of a filter: with fewer rows other kernels are faster, with more the mma is short of work


@dataclass(frozen=True)
class Pairs:
    channels: int
    columns: int
    out_rows: int  # of a step
    stages: int  # steps that copies are ahead
    warps: int = 16


@lru_cache(maxsize=4096)
def conv_pairs(problem: Problem, shared_limit: int) -> Pairs | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    if problem.outputs < ENOUGH_OUTPUTS or problem.horizontal.out <= 28:
        return None
    return next(iter(conv_layouts(problem, shared_limit)), None)


def conv_layouts(problem: Problem, shared_limit: int) -> list[Pairs]:
    """Those that a problem allows, the likely fastest first."""
    v, h = problem.vertical, problem.horizontal
    plain = max(v.s, h.s, v.u, h.u, v.d, h.d, problem.spread, problem.sum) == 1
    small_filter = v.k in SIDES and h.k in SIDES
    if not (plain and problem.by_octets and small_filter and problem.channels % 64 == 0):  # whole lines of memory
        return []
    # beyond 196 KB of shared memory too little is left to the first-level cache, which the copies go through
    first, second, third = Pairs(64, 32, 4, 2), Pairs(64, 64, 2, 3), Pairs(64, 64, 4, 1)
    order = (first, second, third) if h.out <= 32 else (second, third) if v.k == 3 else (third, second)
    return [pairs for pairs in order if macros(problem, pairs)[1] <= shared_limit]


def macros(problem: Problem, pairs: Pairs) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_pairs.cu`` and the shared memory in bytes."""
    v, h = problem.vertical, problem.horizontal
    cells = pairs.columns // 2 + (h.k + 2) // 2 - 1
    slots = leading_steps(v.k - 1, pairs.out_rows) + 1 + pairs.stages
    plane = round_up(slots * pairs.out_rows * cells * 16 - 16, 128) + 16
    outputs = pairs.out_rows * pairs.columns * (2 * pairs.channels + 8)
    return {
        "KH": v.k, "KW": h.k, "SH": 1, "SW": 1, "DH": 1, "DW": 1, "PAD_H": v.p, "PAD_W": h.p, "SPREAD": 1, "SUM": 1,
        "UH": 1, "UW": 1, "CHANNELS": pairs.channels, "COLUMNS": pairs.columns, "ROWS": pairs.out_rows, "STAGES": pairs.stages,
        "THREADS": 32 * pairs.warps,
    }, pairs.channels // 4 * plane + 2 * outputs  # fmt: skip


def describe(problem: Problem, pairs: Pairs) -> str:
    return f"tensor cores, pairs of pixels, {describe_steps(pairs)}"


def plan_conv(problem: Problem, pairs: Pairs, source: Tensor, *result: Any) -> Plan:
    """Forward or input gradient: the plan takes the source, the weight and perhaps a bias."""
    return plan_strips("depthwise_pairs", problem, pairs, macros, source, *result)
