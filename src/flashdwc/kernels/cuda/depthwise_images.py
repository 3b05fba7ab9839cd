"""Launches ``depthwise_images.cu``: channels_last of stride 1, maps of at most 16 x 16, on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import Problem
from .depthwise_tensor_core import conv_plan, conv_sizes

ENOUGH_OUTPUTS = 2**62  # no rule chooses these kernels before they are measured; `flashdwc warmup --tune` may
LARGEST_SIDE, CHANNELS, GROUP, WARPS = 16, 8, 16, 8


@dataclass(frozen=True)
class Images:
    resident: int  # blocks of a multiprocessor


@lru_cache(maxsize=4096)
def conv_images(problem: Problem, shared_limit: int) -> Images | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    if problem.outputs < ENOUGH_OUTPUTS:
        return None
    return next(iter(conv_layouts(problem, shared_limit)), None)


def conv_layouts(problem: Problem, shared_limit: int) -> list[Images]:
    """Those that a problem allows, the likely fastest first."""
    v, h = problem.vertical, problem.horizontal
    plain = max(v.s, h.s, v.u, h.u, problem.spread, problem.sum) == 1
    small = max(v.size, h.size, v.out, h.out) <= LARGEST_SIDE
    if not (plain and small and problem.by_octets and problem.taps > 1):
        return []
    eighths, out_eighths = _eighths(problem)
    registers = v.k * eighths * out_eighths + 70
    shared = conv_macros(problem, Images(1))[1]
    allowed = (Images(resident) for resident in (4, 3, 2, 1) if registers <= min(255, 256 // resident))
    return [images for images in allowed if images.resident * (shared + 1024) <= shared_limit + 1024]


def _eighths(problem: Problem) -> tuple[int, int]:
    """Of the columns of the source and of the result."""
    return -(-problem.horizontal.size // 8), -(-problem.horizontal.out // 8)


def conv_macros(problem: Problem, images: Images) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_images.cu`` and the shared memory in bytes."""
    v, h = problem.vertical, problem.horizontal
    eighths, out_eighths = _eighths(problem)
    planes, out_planes = (CHANNELS * _apart(16 * GROUP * n) for n in (v.size * eighths, v.out * out_eighths))
    slot = max(GROUP * v.size * eighths * (8 * 16 + 32), out_planes)
    macros = {
        "KH": v.k, "KW": h.k, "SH": 1, "SW": 1, "DH": v.d, "DW": h.d, "UH": 1, "UW": 1, "PAD_H": v.p, "PAD_W": h.p, "SPREAD": 1, "SUM": 1,
        "ROWS": v.size, "COLUMNS": h.size, "OUT_ROWS": v.out, "OUT_COLUMNS": h.out, "THREADS": 32 * WARPS, "BLOCKS_PER_SM": images.resident,
    }  # fmt: skip
    return macros, planes + 2 * slot


def _apart(size: int) -> int:
    """Bytes between planes, so that two channels lie in different banks."""
    return size + (64 - size) % 128


def describe(problem: Problem, images: Images) -> str:
    return f"tensor cores, {CHANNELS} channels of {GROUP} whole images at once, {WARPS * images.resident} warps a multiprocessor"


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
    channel_blocks, groups = problem.channels // CHANNELS, -(-problem.images // GROUP)
    places = images.resident * torch.cuda.get_device_properties(source.device).multi_processor_count
    share = -(-groups // min(groups, max(1, places // channel_blocks)))
    numbers = [problem.images, problem.channels, *conv_sizes(problem), channel_blocks, groups, share]
    shape = {"blocks": channel_blocks * -(-groups // share), "threads": 32 * WARPS, "shared_bytes": shared}
    name = "depthwise_images"
    return conv_plan(name, problem, macros, numbers, source, result_size, memory_format, rotate, **shape)
