"""Launches ``depthwise_planar.cu`` and ``depthwise_planar_weight_grad.cu``: few taps, contiguous, on CUDA cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import MULTIPROCESSORS, Axis, Problem
from .depthwise_tensor_core import choose_splits, conv_plan, conv_sizes, weight_grad_plan
from .depthwise_tiles import power_of_two, round_up

THREADS = 256
ENOUGH_BLOCKS = 8  # for each multiprocessor
# What follows was measured on an H200, over some hundred layers of networks.
ENOUGH_THREADS = 40_000
FEW_TAPS, MAX_TAPS, MAX_NARROW_TAPS = 12, 25, 49
TINY, SMALL = 310_000, 1_000_000  # outputs: below the latter, starting costs more than multiplying
ENOUGH_WRITES = 700_000  # outputs times rows of a strip
ENOUGH_STRIPS = 200  # of a channel, for strips of several rows in a weight gradient


@dataclass(frozen=True)
class Strip:
    rows: int  # of 8 columns each, that a thread takes at a time
    lanes: int  # threads of a plane
    height: int = 1  # filter rows of a block, for weight gradients

    @property
    def planes(self) -> int:
        """That a block takes, or channels."""
        return THREADS // self.lanes

    @property
    def threads(self) -> int:
        return self.planes * self.lanes


def suits(problem: Problem) -> bool:
    """Whether the forward kernel covers a problem and is the fastest."""
    return _suits(problem, small=problem.outputs <= SMALL and problem.horizontal.out <= 16)


def suits_weight_grad(problem: Problem) -> bool:
    return _suits(problem, small=problem.outputs <= 2 * SMALL)


def _suits(problem: Problem, *, small: bool) -> bool:
    few = problem.taps <= MAX_TAPS or (
        problem.taps <= MAX_NARROW_TAPS and problem.outputs <= SMALL and is_narrow(problem.horizontal)
    )
    fast = small or problem.taps <= FEW_TAPS or problem.strided or is_narrow(problem.horizontal)
    return few and fast and reaches(problem)


def conv_layouts(problem: Problem, shared_limit: int) -> list[Strip]:
    """Those that a problem allows."""
    if problem.taps > MAX_TAPS or not reaches(problem):
        return []
    most = {rows: min(32, power_of_two(strips_of_plane(problem, rows)[1])) for rows in (4, 2, 1)}
    return [Strip(rows, lanes) for rows in most for lanes in {most[rows], max(1, most[rows] // 2)}]


def weight_grad_layouts(problem: Problem, shared_limit: int) -> list[Strip]:
    if problem.taps > MAX_TAPS or not reaches(problem):
        return []
    heights = {1, problem.vertical.k}
    return [Strip(rows, lanes, height) for rows in (4, 2, 1) for lanes in (32, 128) for height in sorted(heights)]


def reaches(problem: Problem) -> bool:
    """Whether the layout of a problem and the window of a strip suit these kernels."""
    v, h = problem.vertical, problem.horizontal
    plain = max(v.u, h.u, problem.spread, problem.sum) == 1 and max(v.s, h.s) <= 2 and not problem.linear
    planar = not problem.inner.nhwc and not problem.outer.nhwc
    reach = is_narrow(problem.horizontal) or (0 <= h.p <= 8 and (h.k - 1) * h.d - h.p - (h.s - 1) <= 8)
    few_planes = problem.images * problem.channels < 2**31
    return planar and plain and reach and few_planes and 0 < problem.outputs < 2**33


def is_narrow(axis: Axis) -> bool:
    """Whether one strip spans a plane, so that nothing lies beyond its columns."""
    return axis.size <= 8 * axis.s and axis.out <= 8


def conv_strip(problem: Problem) -> Strip:
    v, planes = problem.vertical, problem.images * problem.channels
    most = max(1, (v.k - 1) // v.s) if v.d == 1 else 1  # rows that share what they read
    choices = (
        rows for rows in (4, 2, 1) if rows <= most and planes * strips_of_plane(problem, rows)[1] >= ENOUGH_THREADS
    )
    rows = next(choices, 1)
    strips = strips_of_plane(problem, rows)[1]
    lanes = min(32, power_of_two(strips))
    if lanes == 32 and planes * strips < ENOUGH_THREADS:
        lanes = 16
    if lanes == 32 and problem.outputs > SMALL and not _exchanges(problem, rows):
        lanes = min(range(32, 23, -1), key=lambda n: round_up(strips, n))  # the fewest idle in the last turn
    return Strip(rows, lanes)


def _exchanges(problem: Problem, rows: int) -> bool:
    """Whether many narrow writes would cost more than to exchange outputs among threads."""
    return problem.outer.vector < 4 and problem.outputs * rows > ENOUGH_WRITES * problem.outer.vector


def weight_grad_strip(problem: Problem) -> Strip:
    v, h = problem.vertical, problem.horizontal
    if problem.outputs <= TINY:
        few = problem.images * strips_of_plane(problem, 1)[1] <= 128
        return Strip(1, 128 if few else 256, 1 if h.k == 1 else v.k)
    if is_narrow(h) and problem.taps > 9 and not problem.strided and problem.channels <= 8 * MULTIPROCESSORS:
        return Strip(2, 32, v.k)
    whole = [rows for rows in (4, 2, 1) if v.out > 8 or v.out % rows == 0]
    all_strips = {rows: problem.images * strips_of_plane(problem, rows)[1] for rows in whole}
    rows = next((rows for rows in whole if all_strips[rows] >= ENOUGH_STRIPS), 1)
    lanes = max(32, min(THREADS, power_of_two(all_strips[rows])))
    blocks = -(-problem.channels // Strip(rows, lanes).planes)  # of all filter rows
    idle = problem.outputs <= SMALL and problem.strided and v.k * blocks <= 3 * MULTIPROCESSORS
    return Strip(rows, lanes, 1 if h.k == 1 or idle else v.k)


def describe(problem: Problem, strip: Strip) -> str:
    return f"CUDA cores, {strip.rows} rows x 8 columns of a plane a thread"


def strips_of_plane(problem: Problem, rows: int) -> tuple[int, int]:
    """Strips across a plane, all strips of a plane."""
    across = -(-problem.horizontal.out // 8)
    return across, across * -(-problem.vertical.out // rows)


def narrow_macros(problem: Problem) -> dict[str, int]:
    h = problem.horizontal
    return {"NARROW": h.size, "STRIP": h.out} if is_narrow(h) else {"NARROW": 0, "STRIP": 8}


def conv_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    exchange = _exchanges(problem, strip.rows)
    return {**_common_macros(problem, strip), "UH": 1, "UW": 1, "SUM": 1, "SPREAD": 1, "EXCHANGE": exchange}


def weight_grad_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    return {**_common_macros(problem, strip), "HEIGHT": strip.height}


def _common_macros(problem: Problem, strip: Strip) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "IN_VEC": problem.inner.vector, "OUT_VEC": problem.outer.vector,
        "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p,
        **narrow_macros(problem), "ROWS": strip.rows, "LANES": strip.lanes, "THREADS": strip.threads,
    }  # fmt: skip


def plan_conv(
    problem: Problem,
    strip: Strip,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    across, strips = strips_of_plane(problem, strip.rows)
    planes = problem.images * problem.channels
    groups = -(-planes // strip.planes)
    wanted = ENOUGH_BLOCKS * torch.cuda.get_device_properties(source.device).multi_processor_count
    parts = max(1, min(-(-strips // strip.lanes), -(-wanted // groups)))
    numbers = planes, problem.channels, *conv_sizes(problem), across, strips, parts
    shape = {"blocks": groups * parts, "threads": strip.threads}
    macros = conv_macros(problem, strip)
    return conv_plan("depthwise_planar", problem, macros, numbers, source, result_size, memory_format, rotate, **shape)


def plan_weight_grad(problem: Problem, strip: Strip, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    across, strips = strips_of_plane(problem, strip.rows)
    all_strips, channel_blocks = problem.images * strips, -(-problem.channels // strip.planes)
    columns = channel_blocks * (problem.vertical.k // strip.height)
    few = 4 if columns >= 2 * MULTIPROCESSORS else 1  # groups of strips that are worth one launch
    splits = choose_splits(x.device, columns, -(-all_strips // strip.lanes), resident=2, few=few)
    numbers = problem.channels, *conv_sizes(problem), across, strips, all_strips, channel_blocks
    macros, shape = weight_grad_macros(problem, strip), {"blocks": columns * splits, "threads": strip.threads}
    kernel = "depthwise_planar_weight_grad"
    return weight_grad_plan(kernel, problem, macros, numbers, splits, dy, x, weight_size, weight_stride, **shape)
