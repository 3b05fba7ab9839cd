"""Launches ``depthwise_few.cu``: few outputs, any layout, on CUDA cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import Problem
from .depthwise_tensor_core import conv_plan, conv_sizes

# What follows was measured on an H200, over the layers of networks.
FEW_OUTPUTS, FEW_TAPS = 45_000, 11
MAX_TAPS = 25


@dataclass(frozen=True)
class Few:
    threads: int = 128  # of a block, an output each


def conv_few(problem: Problem, shared_limit: int) -> Few | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    if problem.taps > FEW_TAPS or max(problem.vertical.u, problem.horizontal.u) > 1:
        return None
    return next(iter(conv_layouts(problem, shared_limit)), None)


def conv_layouts(problem: Problem, shared_limit: int) -> list[Few]:
    few = problem.outputs <= FEW_OUTPUTS and problem.taps * problem.sum <= MAX_TAPS
    return [Few()] if few else []


def describe(problem: Problem, few: Few) -> str:
    return "CUDA cores, an output a thread"


def conv_macros(problem: Problem, few: Few) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "UH": v.u, "UW": h.u, "PAD_H": v.p, "PAD_W": h.p,
        "SUM": problem.sum, "SPREAD": problem.spread, "NHWC": problem.outer.nhwc, "THREADS": few.threads,
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
    sizes = problem.channels, *conv_sizes(problem)
    numbers = problem.outputs, *sizes, *(_reciprocal(n) for n in (sizes[0], *sizes[3:]))
    shape = {"blocks": -(-problem.outputs // few.threads), "threads": few.threads}
    macros = conv_macros(problem, few)
    return conv_plan("depthwise_few", problem, macros, numbers, source, result_size, memory_format, rotate, **shape)


def _reciprocal(n: int) -> int:
    """2^32 / n rounded up, as a signed 32-bit number: times a number below 2^16 it tells the quotient, where n > 1."""
    r = -(-(2**32) // n)
    return r - 2**32 if r >= 2**31 else r
