"""Launches ``depthwise_transposed.cu`` and ``depthwise_transposed_weight_grad.cu``: channels_last of stride 1, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_octets import by_width, period_of
from .depthwise_problem import Axis, Problem
from .depthwise_tensor_core import conv_plan, conv_sizes, shares, weight_grad_plan
from .depthwise_tiles import leading_steps, round_up

# What follows was measured on an H200, over the layers of networks.
SOME_TAPS, MANY_TAPS = 25, 81
ENOUGH_OUTPUTS = 1_000_000
ENOUGH_OUTPUTS_OF_FEW_ROWS, FEW_ROWS = 8_000_000, 17
WARPS, REGISTERS = 8, 255
THREADS = 32 * WARPS


@dataclass(frozen=True)
class Transposed:
    channels: int  # of a block
    columns: int  # of a strip
    rows: int  # of each of the row groups of a step
    stages: int  # steps that copies are ahead of what is transposed
    height: int = 0  # filter rows of a block, in a weight gradient

    @property
    def groups(self) -> int:
        return 128 // self.columns

    @property
    def out_rows(self) -> int:  # of a step
        return self.groups * self.rows


@lru_cache(maxsize=4096)
def conv_transposed(problem: Problem, shared_limit: int) -> Transposed | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    v, h = problem.vertical, problem.horizontal
    enough = ENOUGH_OUTPUTS_OF_FEW_ROWS if v.k <= FEW_ROWS else ENOUGH_OUTPUTS
    wide = h.out > (28 if problem.taps <= MANY_TAPS else 8)
    if problem.taps <= SOME_TAPS or problem.outputs < enough or not wide:
        return None
    return next(iter(conv_layouts(problem, shared_limit)), None)


@lru_cache(maxsize=4096)
def weight_grad_transposed(problem: Problem, shared_limit: int) -> Transposed | None:
    """The layout of a weight gradient; None where other kernels are faster."""
    v, h = problem.vertical, problem.horizontal
    enough = ENOUGH_OUTPUTS if problem.taps > MANY_TAPS else ENOUGH_OUTPUTS_OF_FEW_ROWS
    tall = v.k > 4 * h.k
    if problem.taps <= SOME_TAPS or problem.outputs < enough or h.out <= 16 or tall:
        return None
    return next(iter(weight_grad_layouts(problem, shared_limit)), None)


def conv_layouts(problem: Problem, shared_limit: int) -> list[Transposed]:
    """Those that a problem allows, the likely fastest first."""
    v, eighths = problem.vertical, _eighths(problem)
    if not _covers(problem) or eighths < 2:
        return []

    def fits(t: Transposed) -> bool:
        windows = -(-(t.rows + (v.k - 1) * v.d) // t.rows)
        registers = t.channels // WARPS * v.k * eighths + 4 * t.rows + 8 * -(-eighths // 2) + windows + 48
        return _fits(t, registers, conv_macros(problem, t)[1], shared_limit)

    return [t for t in _choices(problem) if t.out_rows <= period_of(v) and fits(t)]


def weight_grad_layouts(problem: Problem, shared_limit: int) -> list[Transposed]:
    """Those that a problem allows, the likely fastest first."""
    v, sixteenths = problem.vertical, _sixteenths(problem)
    if not _covers(problem):
        return []

    def with_height(t: Transposed) -> Transposed:
        beside = 48 if t.channels == WARPS else 100
        height = max(1, (REGISTERS - beside) // (t.channels // WARPS * 4 * sixteenths))
        return replace(t, height=-(-v.k // -(-v.k // height)))

    def fits(t: Transposed) -> bool:
        windows = -(-(t.rows + (t.height - 1) * v.d) // t.rows)
        registers = t.channels // WARPS * t.height * 4 * sixteenths + 2 * t.rows + windows + 48
        return _fits(t, registers, weight_grad_macros(problem, t)[1], shared_limit)

    found = [t for t in map(with_height, _choices(problem)) if t.out_rows <= period_of(v) and fits(t)]
    return sorted(found, key=lambda t: (-(-v.k // t.height), t.rows > 4))  # each part reads both tensors once more


def _covers(problem: Problem) -> bool:
    v, h = problem.vertical, problem.horizontal
    plain = max(v.s, h.s, v.u, h.u, problem.spread, problem.sum) == 1
    rows = problem.images * period_of(v)  # that 32 bits count
    return plain and problem.by_octets and problem.taps > 1 and rows < 2**31


def _choices(problem: Problem) -> Iterator[Transposed]:
    for channels, heights in ((16, (4, 2)), (8, (8, 4, 2))):
        for columns in by_width(problem, (64, 32, 16)):
            for rows in heights:
                for stages in (2, 1):
                    yield Transposed(channels, columns, rows, stages)


def _fits(t: Transposed, registers: int, shared: int, shared_limit: int) -> bool:
    shares_warps = t.out_rows % WARPS == 0 or WARPS % t.out_rows == 0
    shares_stores = t.rows % (2 * WARPS // t.channels) == 0
    return shares_warps and shares_stores and registers <= REGISTERS and shared <= shared_limit


def _eighths(problem: Problem) -> int:
    """Of columns, that the window of 8 outputs spans."""
    return -(-problem.horizontal.span(problem.horizontal.k, 8) // 8)


def _pitch(columns: int, t: Transposed) -> int:
    """Elements between rows, so that the row groups that an ldmatrix reads meet different banks, where they can."""
    apart = {64: range(0, 128, 16), 32: (64,), 16: (32, 96)}[t.columns]
    return next((p for p in range(columns, columns + 64, 8) if 2 * p * t.rows % 128 in apart), columns)


def _sixteenths(problem: Problem) -> int:
    """The same in sixteenths."""
    return -(-problem.horizontal.span(problem.horizontal.k, 8) // 16)


def conv_macros(problem: Problem, t: Transposed) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_transposed.cu`` and the shared memory in bytes."""
    reached = _whole_runs(t, t.columns - 8 + 8 * _eighths(problem))
    macros = {**_macros(problem, t, reached), "SH": 1, "SW": 1, "UH": 1, "UW": 1, "SPREAD": 1, "SUM": 1}
    ring = _ring_bytes(problem, t, reached, problem.vertical.k)
    return macros, ring + 2 * _planes_bytes(t, 256 * t.rows) + (t.stages + 1) * _lines_bytes(t, macros["LOADED"])


def weight_grad_macros(problem: Problem, t: Transposed) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_transposed_weight_grad.cu`` and the shared memory in bytes."""
    reached = _whole_runs(t, t.columns - 8 + 16 * _sixteenths(problem))
    macros = {**_macros(problem, t, reached), "HEIGHT": t.height}
    ring = _ring_bytes(problem, t, reached, t.height)
    lines = _lines_bytes(t, macros["LOADED"]) + _lines_bytes(t, _whole_runs(t, t.columns))
    return macros, ring + 2 * _planes_bytes(t, 256 * t.rows) + (t.stages + 1) * lines


def _macros(problem: Problem, t: Transposed, reached: int) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    blank, loaded = _loaded(h, t, reached)
    return {
        "KH": v.k, "KW": h.k, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "LEAD": 0, "CHANNELS": t.channels, "COLUMNS": t.columns,
        "ROWS": t.rows, "STAGES": t.stages, "PITCH": _pitch(reached, t), "THREADS": THREADS, "BLANK": blank, "LOADED": loaded,
    }  # fmt: skip


def _loaded(h: Axis, t: Transposed, reached: int) -> tuple[int, int]:
    """Of the columns that a strip's windows reach, in whole runs: those that always are padding in front, and those behind them
    that are loaded."""
    if h.out > t.columns:
        return 0, reached
    run = _whole_runs(t, 1)
    blank = max(0, h.p) // run * run
    return blank, min(reached - blank, _whole_runs(t, h.p + h.size - blank))


def _octets(t: Transposed) -> int:
    return t.channels // 8


def _whole_runs(t: Transposed, pixels: int) -> int:
    """Pixels of a row, as many as instructions take that move 256 elements of four octets at most."""
    return round_up(pixels, 8 * max(1, 4 // _octets(t)))


def _planes_bytes(t: Transposed, plane: int) -> int:
    """Of all channels; 8 lanes that meet two channels and four octets or blocks then meet different banks."""
    return _octets(t) * (8 * (plane + (64 - plane) % 128) + (32 if _octets(t) == 2 else 16))


def _ring_bytes(problem: Problem, t: Transposed, reached: int, height: int) -> int:
    slots = leading_steps((height - 1) * problem.vertical.d, t.out_rows) + 2
    return _planes_bytes(t, 2 * _pitch(reached, t) * slots * t.out_rows)


def _lines_bytes(t: Transposed, pixels: int) -> int:
    return t.out_rows * (pixels // 8) * (16 * t.channels + {1: 32, 2: 64}.get(_octets(t), 0))


def describe(problem: Problem, t: Transposed) -> str:
    size = f"{t.channels} channels x {t.out_rows} rows x {t.columns} columns"
    return f"tensor cores, transposed in steps of {size}, {WARPS} warps"


def plan_conv(
    problem: Problem,
    t: Transposed,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    macros, shared = conv_macros(problem, t)
    blocks, _, numbers = _course(problem, t, 1, source.device)
    shape = {"blocks": blocks, "threads": THREADS, "shared_bytes": shared}
    name = "depthwise_transposed"
    return conv_plan(name, problem, macros, numbers, source, result_size, memory_format, rotate, **shape)


def plan_weight_grad(problem: Problem, t: Transposed, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    macros, shared = weight_grad_macros(problem, t)
    height_groups = -(-problem.vertical.k // t.height)
    blocks, splits, numbers = _course(problem, t, height_groups, x.device)
    shape = {"blocks": blocks, "threads": THREADS, "shared_bytes": shared}
    name = "depthwise_transposed_weight_grad"
    return weight_grad_plan(
        name, problem, macros, [*numbers, height_groups], splits, dy, x, weight_size, weight_stride, **shape
    )


def _course(problem: Problem, t: Transposed, height_groups: int, device: torch.device) -> tuple[int, int, list[int]]:
    """All blocks, those that share the steps of some channels and filter rows, and the kernel's sizes."""
    v, h = problem.vertical, problem.horizontal
    period, busy = _period(problem, t)
    steps_down, strips = -(-((problem.images - 1) * period + v.out) // t.out_rows), -(-h.out // t.columns)
    channel_blocks, steps = -(-problem.channels // t.channels), steps_down * strips
    share, splits = shares(device, steps, channel_blocks * height_groups)
    sizes = [problem.images, problem.channels, *conv_sizes(problem), period, busy]
    return channel_blocks * height_groups * splits, splits, [*sizes, steps_down, strips, channel_blocks, steps, share]


def _period(problem: Problem, t: Transposed) -> tuple[int, int]:
    """Rows from one image to the next, and those of them from whose steps on nothing is multiplied: where steps do not lie across
    images, those between images are skipped."""
    out, period = problem.vertical.out, period_of(problem.vertical)
    whole = round_up(period, t.out_rows)
    return (whole, out) if -(-out // t.out_rows) * t.out_rows < period else (period, period)
