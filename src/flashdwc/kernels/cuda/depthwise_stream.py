"""Launches ``depthwise_stream.cu``: filters of stride 1 that move more bytes than they multiply, on tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_problem import Problem
from .depthwise_tensor_core import conv_plan, conv_sizes
from .depthwise_tiles import lead_and_shift, leading_steps, octet_pitch, pitches, round_up

ENOUGH_OUTPUTS = 16_000_000  # that the steps of a strip outweigh its start
LARGEST_SIDE = 31  # of a filter: no larger one fits


class Layout(Protocol):
    """What a block that walks through strips takes at a time."""

    @property
    def channels(self) -> int: ...

    @property
    def columns(self) -> int: ...  # of a strip

    @property
    def out_rows(self) -> int: ...  # of a step

    @property
    def warps(self) -> int: ...


@dataclass(frozen=True)
class Stream:
    channels: int
    blocks: int  # of 8 columns
    rows: int  # output rows of a group
    warps: int = 16

    @property
    def groups(self) -> int:
        return 16 // self.blocks

    @property
    def columns(self) -> int:
        return 8 * self.blocks

    @property
    def out_rows(self) -> int:
        return self.groups * self.rows


@lru_cache(maxsize=4096)
def conv_stream(problem: Problem, shared_limit: int) -> Stream | None:
    """The stream for a forward convolution or an input gradient; None where tiles are faster (measured on an H200)."""
    if problem.outputs < ENOUGH_OUTPUTS or problem.horizontal.out <= 28:
        return None
    return next(iter(conv_layouts(problem, shared_limit)), None)


def conv_layouts(problem: Problem, shared_limit: int) -> list[Stream]:
    """Those that a problem allows, the likely fastest first."""
    v, h = problem.vertical, problem.horizontal
    plain = max(v.s, h.s, v.u, h.u, problem.spread, problem.sum) == 1
    if not (plain and problem.by_octets and max(v.k, h.k) <= LARGEST_SIDE):
        return []
    blocks = 8 if h.out > 32 else 4
    choices: tuple[Stream, ...] = ()
    if max(v.k, h.k) <= 5 and problem.channels % 64 == 0:
        choices += (Stream(64, blocks, 2),)  # whole lines of memory
    if v.k <= 13 and problem.taps > 12:
        choices += Stream(32, blocks, 4), Stream(16, blocks, 6 if v.k > 11 else 5)  # more rows would spill registers
    if problem.taps > 100:
        choices += Stream(16, blocks, 4), Stream(8, blocks, 8, warps=8)
    return [s for s in choices if s.out_rows <= v.out and macros(problem, s)[1] <= shared_limit]


def macros(problem: Problem, stream: Stream) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_stream.cu`` and the shared memory in bytes."""
    v, h = problem.vertical, problem.horizontal
    span = h.span(h.k, 8)
    window = round_up(span, 8)
    lead, shift = lead_and_shift(problem, span, 8)
    columns = (stream.blocks - 1) * 8 + window
    ring = 2 * stream.out_rows + (v.k - 1) * v.d
    row_pitch, plane = pitches(stream.blocks, stream.groups, 1, 1, stream.rows, columns, ring)
    out_plane = stream.out_rows * stream.blocks * 8
    octet, out_octet = octet_pitch(stream.channels, plane), octet_pitch(stream.channels, out_plane)
    filter_row = round_up(7 + lead + window + 1, 2)
    filters = stream.channels * v.k * (2 * filter_row + 2)
    shared = 2 * (stream.channels // 8 * (octet + 2 * out_octet) + filters) + 4 * stream.channels
    return {
        "IN_NHWC": problem.inner.nhwc, "IN_VEC": problem.inner.vector,
        "OUT_NHWC": problem.outer.nhwc, "OUT_VEC": problem.outer.vector,
        "KH": v.k, "KW": h.k, "SH": 1, "SW": 1, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, "SPREAD": 1, "SUM": 1,
        "UH": 1, "UW": 1, "PHASE_H": 0, "PHASE_W": 0, "LEAD": lead, "SHIFT": shift,
        "CHANNELS": stream.channels, "BLOCKS": stream.blocks, "GROUPS": stream.groups, "IMAGES": 1,
        "ROWS": stream.rows, "THREADS": 32 * stream.warps, "BLOCKS_PER_SM": 1,
        "ROW_PITCH": row_pitch, "IMAGE_PITCH": plane, "PLANE_PITCH": plane, "OCTET_PITCH": octet,
        "OUT_IMAGE_PITCH": out_plane, "OUT_PLANE_PITCH": out_plane, "OUT_OCTET_PITCH": out_octet,
    }, shared  # fmt: skip


def describe(problem: Problem, stream: Stream) -> str:
    return f"tensor cores, {describe_steps(stream)}"


def describe_steps(layout: Layout) -> str:
    size = f"{layout.channels} channels x {layout.out_rows} rows x {layout.columns} columns"
    return f"streamed in steps of {size}, {layout.warps} warps"


def plan_conv(problem: Problem, stream: Stream, source: Tensor, *result: Any) -> Plan:
    """Forward or input gradient: the plan takes the source, the weight and perhaps a bias."""
    return plan_strips("depthwise_stream", problem, stream, macros, source, *result)


def plan_strips(
    kernel: str,
    problem: Problem,
    layout: Layout,
    macros: Callable[..., tuple[dict[str, int], int]],
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """The plan of a kernel whose blocks stay, one on each multiprocessor, and walk through strips (``strips.cuh``)."""
    definitions, shared = macros(problem, layout)
    channel_blocks = -(-problem.channels // layout.channels)
    multiprocessors = torch.cuda.get_device_properties(source.device).multi_processor_count
    blocks_of_channels = max(1, multiprocessors // channel_blocks)
    splits, across, down, strip_steps, strips = share(problem, layout.columns, layout.out_rows, blocks_of_channels)
    sizes = problem.images, problem.channels, *conv_sizes(problem)
    numbers = *sizes, across, down, strip_steps, channel_blocks, strips, splits
    shape = {"blocks": channel_blocks * splits, "threads": 32 * layout.warps, "shared_bytes": shared}
    return conv_plan(kernel, problem, definitions, numbers, source, result_size, memory_format, rotate, **shape)


def share(problem: Problem, columns: int, rows: int, splits: int) -> tuple[int, int, int, int, int]:
    """Splits, strips across, strips down, steps of a strip, strips: cut so that the blocks have equal parts.

    ``columns`` of a strip, ``rows`` of a step, ``splits``: blocks that the strips may be shared by.
    """
    v, h = problem.vertical, problem.horizontal
    across = -(-h.out // columns)
    steps = -(-v.out // rows)
    leading = leading_steps((v.k - 1) * v.d, rows)
    strips_of_full_height = problem.images * across

    def rounds(strip_steps: int) -> tuple[int, int]:
        strips = strips_of_full_height * -(-steps // strip_steps)
        return -(-strips // splits) * (strip_steps + leading), -strip_steps

    strip_steps = min(range(1, steps + 1), key=rounds)
    down = -(-steps // strip_steps)
    strips = strips_of_full_height * down
    return min(splits, strips), across, down, strip_steps, strips
