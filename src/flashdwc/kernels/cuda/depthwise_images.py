"""Launches ``depthwise_images.cu`` and ``depthwise_images_weight_grad.cu``: stride 1, maps of at most 16 x 16, on tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import MULTIPROCESSORS, Problem
from .depthwise_tensor_core import conv_plan, conv_sizes, shares, weight_grad_plan

LARGEST_SIDE, CHANNELS, GROUP, WARPS = 16, 8, 16, 8
ENOUGH_IMAGES = 8  # of a group; the others are multiplied as well


@dataclass(frozen=True)
class Images:
    resident: int  # blocks of a multiprocessor
    height: int = 0  # filter rows of a block, in a weight gradient
    sets: int = 1  # of warps, in a weight gradient, with groups of images of their own

    @property
    def threads(self) -> int:
        return 32 * WARPS * self.sets


# The rules were measured on an H200, over the layers of networks. What these kernels take depends little on the filter, so they win where
# it is large beside the map.
MANY_OUTPUTS = 2_000_000


@lru_cache(maxsize=4096)
def conv_images(problem: Problem, shared_limit: int) -> Images | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    if (images := _first(conv_layouts, problem, shared_limit)) is None:
        return None
    taps, outputs, reach, wide = problem.taps, problem.outputs, _reach(problem), max(_eighths(problem)) > 1
    many = outputs >= MANY_OUTPUTS
    if not problem.by_octets:
        wins = taps >= 49 and (many or not wide) or (taps >= 25 and many and _busy(problem, images))
    elif wide:
        wins = many and (taps >= 121 or (taps >= 49 and reach >= 15))
    else:
        wins = taps >= 49 or (reach >= 9 and outputs >= 1_000_000) or (taps >= 25 and 200_000 <= outputs <= 3_500_000)
    return images if wins or taps >= 400 else None


@lru_cache(maxsize=4096)
def weight_grad_images(problem: Problem, shared_limit: int) -> Images | None:
    """The layout of a weight gradient; None where other kernels are faster."""
    if (images := _first(weight_grad_layouts, problem, shared_limit)) is None:
        return None
    taps, reach, wide = problem.taps, _reach(problem), max(_eighths(problem)) > 1
    wins = taps >= 49 and reach >= 11
    if problem.outputs >= MANY_OUTPUTS:
        if not wide:
            wins = taps >= 25 or (reach >= 7 and problem.by_octets)
        elif not problem.by_octets:
            wins = taps >= 49 or (taps >= 25 and _busy(problem, images))
    return images if wins else None


def _reach(problem: Problem) -> int:
    """Rows or columns of the input, the fewer, from a filter's first to its last."""
    return min((axis.k - 1) * axis.d + 1 for axis in (problem.vertical, problem.horizontal))


def _height_groups(problem: Problem, height: int) -> int:
    return -(-problem.vertical.k // height) if height else 1


def _columns(problem: Problem, height: int) -> int:
    """Blocks that have no sum in common."""
    return problem.channels // CHANNELS * _height_groups(problem, height)


def _busy(problem: Problem, images: Images) -> bool:
    """Do blocks leave few multiprocessors idle?"""
    columns, places = _columns(problem, images.height), images.resident * MULTIPROCESSORS
    return max(1, places // columns) * columns / (-(-columns // places) * places) > 0.85


def _first(layouts: Callable, problem: Problem, shared_limit: int) -> Images | None:
    return next(iter(layouts(problem, shared_limit)), None) if problem.images >= ENOUGH_IMAGES else None


def conv_layouts(problem: Problem, shared_limit: int) -> list[Images]:
    """Those that a problem allows, the likely fastest first."""
    eighths, out_eighths = _eighths(problem)
    registers = problem.vertical.k * eighths * out_eighths + 70
    return _fitting(problem, [Images(resident) for resident in (4, 3, 2, 1)], registers, conv_macros, shared_limit)


def weight_grad_layouts(problem: Problem, shared_limit: int) -> list[Images]:
    """Those that a problem allows, the likely fastest first."""
    of_a_row = 4 * _eighths(problem)[1]  # registers
    parts = -(-problem.vertical.k * of_a_row // 112)
    height = -(-problem.vertical.k // parts)
    # so that no launch has to add parts of sums
    one_each = MULTIPROCESSORS // 2 < _columns(problem, height) <= MULTIPROCESSORS
    sets = [n for n in (3, 2) if one_each and problem.images > (2 * n - 1) * GROUP]
    choices = [Images(1, height, n) for n in sets] + [Images(resident, height) for resident in (4, 3, 2, 1)]
    return _fitting(problem, choices, height * of_a_row + 57, weight_grad_macros, shared_limit)


def _fitting(
    problem: Problem, choices: Sequence[Images], registers: int, macros_of: Callable, shared_limit: int
) -> list[Images]:
    v, h = problem.vertical, problem.horizontal
    plain = max(v.s, h.s, v.u, h.u, problem.spread, problem.sum) == 1
    small = max(v.size, h.size, v.out, h.out) <= LARGEST_SIDE
    runs = problem.inner.run == problem.outer.run == 8 and problem.channels % CHANNELS == 0
    if not (plain and small and (problem.by_octets or runs) and problem.taps > 1):
        return []

    def fits(images: Images) -> bool:
        enough_registers = registers <= min(255, 65536 // (images.resident * images.threads))
        return enough_registers and images.resident * (macros_of(problem, images)[1] + 1024) <= shared_limit + 1024

    return list(filter(fits, choices))


def _eighths(problem: Problem) -> tuple[int, int]:
    """Of the columns of the source and of the result."""
    return -(-problem.horizontal.size // 8), -(-problem.horizontal.out // 8)


def conv_macros(problem: Problem, images: Images) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_images.cu`` and the shared memory in bytes."""
    lines, planes, out_lines, out_planes = _bytes(problem)
    planes = planes if problem.by_octets else max(planes, out_lines)  # which outputs pass as well
    macros = {**_macros(problem, images), "SH": 1, "SW": 1, "UH": 1, "UW": 1, "SPREAD": 1, "SUM": 1}
    return macros, planes + 2 * max(lines, out_planes)


def weight_grad_macros(problem: Problem, images: Images) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_images_weight_grad.cu`` and the shared memory in bytes."""
    lines, planes, out_lines, out_planes = _bytes(problem)
    return {**_macros(problem, images), "HEIGHT": images.height}, images.sets * (
        planes + out_planes + max(lines, out_lines)
    )


def _macros(problem: Problem, images: Images) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "KH": v.k, "KW": h.k, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "ROWS": v.size, "COLUMNS": h.size,
        "OUT_ROWS": v.out, "OUT_COLUMNS": h.out, "NHWC": problem.by_octets, "THREADS": images.threads, "BLOCKS_PER_SM": images.resident,
    }  # fmt: skip


def _bytes(problem: Problem) -> tuple[int, int, int, int]:
    """Of the source as it lies in memory, of its planes, and the same of the result: of 8 channels and 16 images."""
    v, h = problem.vertical, problem.horizontal
    found: list[int] = []
    for rows, columns, eighths in zip((v.size, v.out), (h.size, h.out), _eighths(problem)):
        blocks = GROUP * rows * eighths
        found.append(blocks * (8 * 16 + 32) if problem.by_octets else GROUP * 16 * (rows * columns | 1))
        found.append(CHANNELS * (16 * blocks + (64 - 16 * blocks) % 128))
    return found[0], found[1], found[2], found[3]


def describe(problem: Problem, images: Images) -> str:
    return f"tensor cores, {CHANNELS} channels of {GROUP} whole images at once, {images.threads // 32 * images.resident} warps a multiprocessor"


def plan_conv(
    problem: Problem,
    images: Images,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    macros, shared = conv_macros(problem, images)
    blocks, _, numbers = _course(problem, images, source.device)
    shape = {"blocks": blocks, "threads": images.threads, "shared_bytes": shared}
    name = "depthwise_images"
    return conv_plan(name, problem, macros, numbers, source, result_size, memory_format, rotate, **shape)


def plan_weight_grad(problem: Problem, images: Images, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    macros, shared = weight_grad_macros(problem, images)
    blocks, splits, numbers = _course(problem, images, x.device)
    shape = {"blocks": blocks, "threads": images.threads, "shared_bytes": shared}
    name = "depthwise_images_weight_grad"
    numbers.append(_height_groups(problem, images.height))
    return weight_grad_plan(name, problem, macros, numbers, splits, dy, x, weight_size, weight_stride, **shape)


def _course(problem: Problem, images: Images, device: torch.device) -> tuple[int, int, list[int]]:
    """All blocks, those that share the groups of some channels and filter rows, and the kernel's sizes."""
    columns, groups = _columns(problem, images.height), -(-problem.images // GROUP)
    share, splits = shares(device, groups, columns, images.resident)
    sizes = [problem.images, problem.channels, *conv_sizes(problem), problem.channels // CHANNELS, groups, share]
    return columns * splits, splits, sizes
