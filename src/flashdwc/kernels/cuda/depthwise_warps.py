"""Launches ``depthwise_warps.cu`` and ``depthwise_warps_weight_grad.cu``: contiguous, any filter that registers hold, on tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import Problem
from .depthwise_tensor_core import conv_plan, conv_sizes, weight_grad_plan
from .depthwise_tiles import leading_steps

# What follows was measured on an H200, over the layers of networks.
FEW_TAPS = 12  # those are for CUDA cores where the outputs are few or rows are wide:
ENOUGH_OUTPUTS, ENOUGH_WEIGHT_GRAD_OUTPUTS = 1_200_000, 2_000_000
WIDE = 64
SOME_TAPS = 25  # those are for CUDA cores where rows come in pieces of 2
FEW_OPERANDS = 56  # registers, of 128
ENOUGH_WARPS = 4096  # steps of all maps, for blocks of 8 warps


@dataclass(frozen=True)
class Warps:
    blocks: int  # of 8 columns, in a row of a tile
    rows: int  # of each of its row groups
    stages: int  # steps that copies are ahead
    warps: int  # of a block
    resident: int  # blocks of a multiprocessor
    height: int = 0  # filter rows of a warp, in a weight gradient

    @property
    def columns(self) -> int:
        return 8 * self.blocks

    @property
    def out_rows(self) -> int:  # of a step
        return 16 // self.blocks * self.rows


@lru_cache(maxsize=4096)
def conv_warps(problem: Problem, shared_limit: int) -> Warps | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    enough = problem.outputs >= ENOUGH_OUTPUTS and (problem.strided or problem.horizontal.out <= WIDE)
    suits = _suits(problem, enough)
    if _narrow_pieces(problem):
        suits = problem.taps > SOME_TAPS and not problem.strided and _operands(problem) <= FEW_OPERANDS
    return next(iter(conv_layouts(problem, shared_limit)), None) if suits else None


@lru_cache(maxsize=4096)
def weight_grad_warps(problem: Problem, shared_limit: int) -> Warps | None:
    """The layout of a weight gradient; None where other kernels are faster."""
    enough = problem.outputs >= ENOUGH_WEIGHT_GRAD_OUTPUTS and problem.horizontal.out <= WIDE
    suits = _suits(problem, enough) and (problem.taps > SOME_TAPS or not _narrow_pieces(problem))
    return next(iter(weight_grad_layouts(problem, shared_limit)), None) if suits else None


def conv_layouts(problem: Problem, shared_limit: int) -> list[Warps]:
    """Those that a problem allows, the likely fastest first."""
    v, h = problem.vertical, problem.horizontal
    eighths, blocks = _pieces(problem, 8), _blocks(problem)
    if not _covers(problem) or max(v.s, h.s) > 2 or eighths < 2 or problem.sum > 1:
        return []
    operands = _operands(problem)
    choices: list[Warps] = []
    if max(v.s, h.s) > 1:
        choices += [Warps(blocks, 4, 1, 8, 1)]
    if operands <= FEW_OPERANDS:
        takes_registers = v.d > 2 and blocks == 4  # dilated windows do
        tall = Warps(blocks, 4, 1, 8, 2) if takes_registers else _tall(problem, 8, 2)
        choices += [tall] if _enough_warps(problem) or tall.rows == 2 else [Warps(blocks, 8, 1, 4, 2)]
        choices += [Warps(blocks, rows, stages, 8, 2) for rows, stages in ((8, 1), (4, 2), (4, 1), (2, 1))]
    if operands <= 184:
        choices += [_tall(problem, 8, 1, stages=1), Warps(blocks, 8, 1, 4, 2)]
    if operands <= 200:
        choices += [Warps(blocks, 4, 1, 8, 1)]
    return _fitting(choices, problem, conv_macros, shared_limit)


def weight_grad_layouts(problem: Problem, shared_limit: int) -> list[Warps]:
    """Those that a problem allows, the likely fastest first."""
    v, blocks = problem.vertical, _blocks(problem)
    of_a_row = 4 * _pieces(problem, 16)  # registers
    if not _covers(problem) or problem.strided or problem.spread > 1 or of_a_row > 24:
        return []
    parts = -(-v.k * of_a_row // 104)
    height = -(-v.k // parts)
    rows = min(4, _tall(problem, 4, 2).rows)
    choices: list[Warps] = []
    if not _enough_warps(problem):
        choices += [Warps(blocks, rows, 1, 4, 2)]
    elif height * of_a_row <= 48:
        choices += [Warps(blocks, rows, 2, 8, 2)]
    elif height * of_a_row <= 96:
        choices += [_tall(problem, 4, 3)]
    choices += [_tall(problem, 4, 2), Warps(blocks, 4, 2, 4, 2), Warps(blocks, 4, 1, 4, 2)]
    return _fitting([replace(warps, height=height) for warps in choices], problem, weight_grad_macros, shared_limit)


def _suits(problem: Problem, enough: bool) -> bool:
    return (problem.taps > FEW_TAPS or enough) and problem.horizontal.out > 8 and problem.vertical.out > 1


def _tall(problem: Problem, warps: int, resident: int, stages: int = 2) -> Warps:
    """With the rows that fill a map's steps best, as many as possible; fewer leave room for more copies ahead."""
    choices = [Warps(_blocks(problem), rows, stages if rows == 4 else 1, warps, resident) for rows in (8, 4, 2)]
    return min(choices, key=lambda w: _steps(problem, w)[0] * w.out_rows)


def _operands(problem: Problem) -> int:
    """Registers of a filter and of the pixels that meet it."""
    eighths = _pieces(problem, 8)
    return problem.vertical.k * eighths + 8 * -(-eighths // 2)


def _narrow_pieces(problem: Problem) -> bool:
    return min(problem.inner.vector, problem.outer.vector) < 4


def _enough_warps(problem: Problem) -> bool:
    down, across = _steps(problem, Warps(_blocks(problem), 8, 1, 8, 2))
    return problem.images * problem.channels * down * across >= ENOUGH_WARPS


def _covers(problem: Problem) -> bool:
    plain = problem.vertical.u * problem.horizontal.u == 1 and not problem.linear
    planar = not problem.inner.nhwc and not problem.outer.nhwc
    return plain and planar and min(problem.inner.vector, problem.outer.vector) >= 2 and problem.outputs > 0


def _blocks(problem: Problem) -> int:
    return min((8, 4, 2), key=lambda blocks: -(-problem.horizontal.out // (8 * blocks)) * (blocks + 2))


def _lead(problem: Problem) -> int:
    """Columns loaded before the window, so that copies are aligned."""
    return -problem.horizontal.p % problem.inner.vector


def _pieces(problem: Problem, columns: int) -> int:
    """Of so many columns, that the window of 8 outputs spans."""
    return -(-(_lead(problem) + problem.horizontal.span(problem.horizontal.k, 8)) // columns)


def _pitch(columns: int, warps: Warps, stride: int) -> int:
    """Elements between rows, so that the row groups that an ldmatrix reads meet different banks, where they can."""
    apart = {8: (), 4: (64,), 2: (32, 96)}[warps.blocks]
    pitches = range(columns, columns + 64, 8)
    return next((p for p in pitches if 2 * p * warps.rows * stride % 128 in apart), columns)


def _fitting(choices: Sequence[Warps], problem: Problem, macros_of: Callable, shared_limit: int) -> list[Warps]:
    def fits(warps: Warps) -> bool:
        loaded = (warps.blocks - 1) * 8 * problem.horizontal.s + 16 * _pieces(problem, 16)
        a_piece_a_lane = loaded <= 32 * problem.inner.vector and warps.columns <= 32 * problem.outer.vector
        return a_piece_a_lane and warps.resident * (macros_of(problem, warps)[1] + 1024) <= shared_limit + 1024

    return list(filter(fits, dict.fromkeys(choices)))


def conv_macros(problem: Problem, warps: Warps) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_warps.cu`` and the shared memory in bytes."""
    v, h = problem.vertical, problem.horizontal
    slot_rows = warps.out_rows * v.s
    slots = leading_steps((v.k - 1) * v.d + 1 - v.s, slot_rows) + 1 + warps.stages
    pitch = _pitch((warps.blocks - 1) * 8 * h.s + 8 * _pieces(problem, 8), warps, v.s)
    macros = {
        **_macros(problem, warps), "SH": v.s, "SW": h.s, "UH": 1, "UW": 1, "SPREAD": problem.spread, "SUM": 1, "PITCH": pitch,
    }  # fmt: skip
    return macros, 2 * warps.warps * slots * slot_rows * pitch


def weight_grad_macros(problem: Problem, warps: Warps) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_warps_weight_grad.cu`` and the shared memory in bytes."""
    sixteenths = _pieces(problem, 16)
    pitch = _pitch(8 * warps.blocks + 16 * sixteenths - 8, warps, 1)
    out_pitch = _pitch(8 * warps.blocks, warps, 1)
    slots = _leading(problem, warps) + 1 + warps.stages
    rings = 2 * warps.out_rows * (slots * pitch + (1 + warps.stages) * out_pitch)
    macros = {
        **_macros(problem, warps), "HEIGHT": warps.height, "OUT_VEC": problem.outer.vector, "PITCH": pitch, "OUT_PITCH": out_pitch,
    }  # fmt: skip
    return macros, warps.warps * max(rings, 16 * sixteenths * 8 * 4)


def _leading(problem: Problem, warps: Warps) -> int:
    """Steps that only load, at the start of a weight gradient's strip."""
    return leading_steps((warps.height - 1) * problem.vertical.d, warps.out_rows)


def _macros(problem: Problem, warps: Warps) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "KH": v.k, "KW": h.k, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "LEAD": _lead(problem), "VEC": problem.inner.vector,
        "BLOCKS": warps.blocks, "ROWS": warps.rows, "STAGES": warps.stages, "THREADS": 32 * warps.warps, "BLOCKS_PER_SM": warps.resident,
    }  # fmt: skip


def describe(problem: Problem, warps: Warps) -> str:
    size = f"{warps.out_rows} rows x {warps.columns} columns"
    return (
        f"tensor cores, each warp on its own, in steps of {size}, {warps.warps * warps.resident} warps a multiprocessor"
    )


def _slots(warps: Warps, device: torch.device) -> int:
    """Warps that the device holds."""
    return torch.cuda.get_device_properties(device).multi_processor_count * warps.resident * warps.warps


def _steps(problem: Problem, warps: Warps) -> tuple[int, int]:
    """Of a map: down and across."""
    return -(-problem.vertical.out // warps.out_rows), -(-problem.horizontal.out // warps.columns)


def plan_conv(
    problem: Problem,
    warps: Warps,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    macros, shared = conv_macros(problem, warps)
    down, across = _steps(problem, warps)
    steps = problem.channels * problem.images * down * across
    share = -(-steps // _slots(warps, source.device))
    numbers = [problem.images, problem.channels, *conv_sizes(problem), down, across, steps, share]
    shape = {"blocks": -(-steps // (share * warps.warps)), "threads": 32 * warps.warps, "shared_bytes": shared}
    return conv_plan("depthwise_warps", problem, macros, numbers, source, result_size, memory_format, rotate, **shape)


def plan_weight_grad(problem: Problem, warps: Warps, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    macros, shared = weight_grad_macros(problem, warps)
    down, across = _steps(problem, warps)
    height_groups, steps = -(-problem.vertical.k // warps.height), problem.images * down * across
    slots, leading = _slots(warps, x.device), _leading(problem, warps)

    def rounds(splits: int) -> tuple[int, int]:
        return -(-problem.channels * height_groups * splits // slots) * (-(-steps // splits) + leading), splits

    share = -(-steps // min(range(1, min(steps, 512) + 1), key=rounds))
    splits = -(-steps // share)
    numbers = [problem.images, problem.channels, *conv_sizes(problem), down, across, steps, share, height_groups]
    blocks = -(-problem.channels * splits * height_groups // warps.warps)
    shape = {"blocks": blocks, "threads": 32 * warps.warps, "shared_bytes": shared}
    kernel = "depthwise_warps_weight_grad"
    return weight_grad_plan(kernel, problem, macros, numbers, splits, dy, x, weight_size, weight_stride, **shape)
