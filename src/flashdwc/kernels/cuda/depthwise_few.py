"""Launches ``depthwise_few.cu``: few outputs, any layout, on CUDA cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.backend import Plan
from . import depthwise_direct as direct
from .depthwise_problem import Problem
from .depthwise_tensor_core import conv_plan, divisors

# What follows was measured on an H200, over the layers of networks.
FEW_OUTPUTS, FEW_TAPS = 45_000, 11
MAX_OUTPUTS, MAX_TAPS = 400_000, 25


@dataclass(frozen=True)
class Few:
    channels: int  # neighbouring threads
    threads: int = 128  # of a block, an output each


def conv_few(problem: Problem, shared_limit: int) -> Few | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    if (
        direct.why_not(problem) is None
        or problem.outputs > FEW_OUTPUTS
        or problem.taps > FEW_TAPS
        or max(problem.vertical.u, problem.horizontal.u) > 1
    ):
        return None
    return next(iter(conv_layouts(problem, shared_limit)), None)


def conv_layouts(problem: Problem, shared_limit: int) -> list[Few]:
    few = problem.outputs <= MAX_OUTPUTS and problem.taps * problem.sum <= MAX_TAPS
    return [Few(channels) for channels in ((8,) if problem.outer.nhwc else (1,))] if few else []


def describe(problem: Problem, few: Few) -> str:
    return "CUDA cores, an output a thread"


def conv_macros(problem: Problem, few: Few) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "UH": v.u, "UW": h.u, "PAD_H": v.p, "PAD_W": h.p,
        "SUM": problem.sum, "SPREAD": problem.spread, "CHANNELS": few.channels, "THREADS": few.threads,
    }  # fmt: skip


def plan_conv(
    problem: Problem,
    few: Few,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    sizes = -(-problem.channels // few.channels), problem.vertical.out, problem.horizontal.out
    threads = problem.images * math.prod(sizes) * few.channels
    numbers = threads, problem.channels, problem.vertical.size, problem.horizontal.size, *divisors(*sizes)
    shape = {"blocks": -(-threads // few.threads), "threads": few.threads}
    macros = conv_macros(problem, few)
    return conv_plan("depthwise_few", problem, macros, numbers, source, result_size, memory_format, rotate, **shape)
