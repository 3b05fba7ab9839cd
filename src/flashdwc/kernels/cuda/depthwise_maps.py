"""Launches ``depthwise_maps.cu`` and ``depthwise_maps_weight_grad.cu``: few taps, contiguous, small maps, on CUDA cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...core.backend import Plan
from .depthwise_planar import is_narrow, narrow_macros, reaches, strips_of_plane
from .depthwise_problem import Axis, Layout, Problem
from .depthwise_tensor_core import conv_plan, conv_sizes, weight_grad_plan
from .depthwise_tiles import round_up

# What follows was measured on an H200, over the layers of networks.
ENOUGH_OUTPUTS, ENOUGH_WEIGHT_GRAD_OUTPUTS = 60_000, 1_100_000  # below, a block's start and end outweigh
SOME_OUTPUTS, MANY_OUTPUTS = 500_000, 2_000_000  # up to these threads take one or two rows of them, and one strip
FEW_TAPS, MAX_TAPS, MAX_NARROW_TAPS = 9, 25, 49  # the last of maps of at most two strips across
SHARED_BYTES = 64 * 1024  # so that three blocks share a multiprocessor
THREADS = 128


@dataclass(frozen=True)
class Maps:
    """What a block takes of an image, and how its threads share that."""

    maps: int
    rows: int  # of 8 columns each, that a thread takes at a time
    lanes: int  # threads of a map
    resident: int = 1  # blocks of a multiprocessor

    @property
    def threads(self) -> int:
        return round_up(self.maps * self.lanes, 32)


@dataclass(frozen=True)
class _Stage:
    """How a map lies in shared memory."""

    left: int
    pitch: int
    gap: int  # rows of zeros between maps
    map_pitch: int
    elements: int  # of all maps


def _filled(problem: Problem) -> Problem:
    """With zeros in place of an input gradient's stride."""

    def fill(axis: Axis) -> Axis:
        return replace(axis, size=(axis.size - 1) * axis.u + 1, u=1)

    return replace(problem, vertical=fill(problem.vertical), horizontal=fill(problem.horizontal))


def _stage(problem: Problem, maps: Maps) -> _Stage:
    filled = _filled(problem)
    v, h = filled.vertical, filled.horizontal
    left = 8 if h.p > 0 and not is_narrow(h) else 0  # what a row reaches behind its end are then the zeros of the next
    pitch = max(round_up(problem.horizontal.size, 8) * problem.horizontal.u, round_up(h.out, 8) * h.s) + 8
    last = (round_up(v.out, maps.rows) - 1) * v.s + (v.k - 1) * v.d - v.p  # row of a map that a strip reaches
    gap = max(v.p, last + 1 - v.size, 0)
    map_pitch = _map_pitch(problem, (v.size + gap) * pitch)
    return _Stage(left, pitch, gap, map_pitch, round_up(gap * pitch + maps.maps * map_pitch + 8, 8))


def _out_stage(problem: Problem, maps: Maps) -> _Stage:
    pitch, rows = round_up(problem.horizontal.out, 8), round_up(problem.vertical.out, maps.rows)
    map_pitch = _map_pitch(problem, rows * pitch)
    return _Stage(0, pitch, 0, map_pitch, maps.maps * map_pitch)


def _map_pitch(problem: Problem, elements: int) -> int:
    """From one map to the next, so that what neighbouring threads read lies in different banks."""
    if problem.horizontal.s > 1:  # neighbouring threads have neighbouring maps
        return elements + (8 - elements) % 64
    return elements + 8 if elements % 64 == 0 else elements


def _run_vector(layout: Layout, problem: Problem, maps: int, map_elements: int) -> int:
    """Elements of the widest access that fits the runs of memory of all blocks."""
    counts = maps * map_elements, problem.channels % maps * map_elements
    return next((v for v in (8, 4, 2) if layout.run % v == 0 and all(n % v == 0 for n in counts)), 1)


def _run_vectors(problem: Problem, maps: int) -> tuple[int, int]:
    """Of what is read with the taps, and of the other."""
    v, h = problem.vertical, problem.horizontal
    inner = _run_vector(problem.inner, problem, maps, v.size * h.size)
    return inner, _run_vector(problem.outer, problem, maps, v.out * h.out)


def conv_macros(problem: Problem, maps: Maps) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_maps.cu`` and the shared memory in bytes."""
    outputs, outer = problem.vertical.out * problem.horizontal.out, problem.outer.vector
    gathered = maps.maps * outputs if outer < 4 else 0
    macros = {
        **_common_macros(problem, maps), "UH": problem.vertical.u, "UW": problem.horizontal.u, "SUM": 1, "SPREAD": 1,
        "OUT_VEC": outer, "OUT_RUN_VEC": _run_vectors(problem, maps.maps)[1],
    }  # fmt: skip
    return macros, 2 * (_stage(problem, maps).elements + _run(problem, maps) + round_up(gathered, 8))


def weight_grad_macros(problem: Problem, maps: Maps) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_maps_weight_grad.cu`` and the shared memory in bytes."""
    out_stage, outputs = _out_stage(problem, maps), problem.vertical.out * problem.horizontal.out
    macros = {
        **_common_macros(problem, maps), "OUT_VEC": problem.outer.vector, "OUT_RUN_VEC": _run_vectors(problem, maps.maps)[1],
        "OUT_PITCH": out_stage.pitch, "OUT_MAP_PITCH": out_stage.map_pitch, "OUT_STAGE": out_stage.elements,
    }  # fmt: skip
    staged = (
        _stage(problem, maps).elements + out_stage.elements + _run(problem, maps) + round_up(maps.maps * outputs, 8)
    )
    return macros, max(2 * staged, 4 * maps.threads * (problem.taps | 1))


def _run(problem: Problem, maps: Maps) -> int:
    return round_up(maps.maps * problem.vertical.size * problem.horizontal.size, 8)


def _common_macros(problem: Problem, maps: Maps) -> dict[str, int]:
    v, h, stage = problem.vertical, problem.horizontal, _stage(problem, maps)
    across, strips = strips_of_plane(problem, maps.rows)
    return {
        "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p, **narrow_macros(_filled(problem)),
        "IN_VEC": problem.inner.vector, "RUN_VEC": _run_vectors(problem, maps.maps)[0], "MAP_ROWS": v.size, "MAP_COLUMNS": h.size,
        "OUT_ROWS": v.out, "OUT_COLUMNS": h.out, "STRIPS_ACROSS": across, "STRIPS": strips, "GAP": stage.gap, "MAP_PITCH": stage.map_pitch,
        "STAGE": stage.elements, "RUN": _run(problem, maps),
        "LEFT": stage.left, "PITCH": stage.pitch, "ROWS": maps.rows, "LANES": maps.lanes, "MAPS": maps.maps, "THREADS": maps.threads, "TURNED": h.s > 1,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def conv_maps(problem: Problem, shared_limit: int) -> Maps | None:
    """The layout of a forward convolution or an input gradient; None where other kernels are faster."""
    v, h = problem.vertical, problem.horizontal
    if max(v.s, h.s) > 1:
        wins = h.out <= 32
    else:
        small = h.out <= 32 and problem.outputs < MANY_OUTPUTS
        wins = problem.strided or _beside_tensor_cores(problem, small or ((h.k - 1) * h.d < 7 and 32 < h.out <= 56))
    if not (wins and _suits(problem, ENOUGH_OUTPUTS)):
        return None
    many = 8 if problem.outputs >= MANY_OUTPUTS and not problem.strided else None
    return _lay_out(problem, _conv_rows(problem), many, conv_macros, shared_limit)


def _conv_rows(problem: Problem) -> tuple[int, ...]:
    """Choices of rows."""
    v, h, taps = problem.vertical, problem.horizontal, problem.taps
    if max(v.s, h.s) > 1:
        return (2,) if taps > FEW_TAPS and h.out > 8 else (1,)
    if problem.outputs < MANY_OUTPUTS and not problem.strided:
        return (1,) if problem.outputs < SOME_OUTPUTS or h.out > 16 else (2,)
    if taps > MAX_TAPS:
        return (4,)
    wide = 16 < h.out <= (32 if problem.strided else 56)
    return (4, 2, 1) if wide or (h.out <= 8 and taps <= FEW_TAPS) else (7, 4, 2, 1)


@lru_cache(maxsize=4096)
def weight_grad_maps(problem: Problem, shared_limit: int) -> Maps | None:
    """The layout of a weight gradient; None where other kernels are faster."""
    v, h, taps = problem.vertical, problem.horizontal, problem.taps
    if problem.strided:
        wins = h.out <= (32 if taps > FEW_TAPS else 16)
        rows: tuple[int, ...] = (2,) if h.out > 8 else (1,)
    else:
        wins = _beside_tensor_cores(problem, False)
        rows = (1,) if h.out <= 8 and taps > FEW_TAPS and max(v.d, h.d) > 1 else (2,)
    many = 14 if problem.outputs >= MANY_OUTPUTS else None
    suits = wins and _suits(problem, ENOUGH_WEIGHT_GRAD_OUTPUTS)
    return _lay_out(problem, rows, many, weight_grad_macros, shared_limit) if suits else None


def _beside_tensor_cores(problem: Problem, large_maps: bool) -> bool:
    """At stride 1, are these kernels faster than tensor cores, which take rows in pieces of 4 columns, and many taps in pieces of 2?"""
    vector, out = min(problem.inner.vector, problem.outer.vector), problem.horizontal.out
    if problem.taps > FEW_TAPS:
        return out <= (16 if vector < (4 if problem.taps <= MAX_TAPS else 2) else 8)
    return out <= 8 or vector < 4 or large_maps


def conv_layouts(problem: Problem, shared_limit: int) -> list[Maps]:
    """Those that a problem allows."""
    return _layouts(problem, (7, 4, 2, 1), conv_macros, shared_limit)


def weight_grad_layouts(problem: Problem, shared_limit: int) -> list[Maps]:
    return _layouts(problem, (4, 2, 1), weight_grad_macros, shared_limit)


def _layouts(problem: Problem, choices: Sequence[int], macros_of: Callable, shared_limit: int) -> list[Maps]:
    if not _covers(problem):
        return []
    found = (_lay_out(problem, (rows,), many, macros_of, shared_limit) for rows in choices for many in (None, 0))
    return list(dict.fromkeys(maps for maps in found if maps is not None))


def _suits(problem: Problem, enough: int) -> bool:
    return problem.outputs >= enough and problem.vertical.out > 1 and _covers(problem)


def _covers(problem: Problem) -> bool:
    most = MAX_NARROW_TAPS if problem.horizontal.out <= 16 else MAX_TAPS
    runs = problem.inner.run * problem.outer.run > 0 and max(problem.vertical.u, problem.horizontal.u) <= 2
    return problem.taps <= most and runs and reaches(_filled(problem))


def _lay_out(
    problem: Problem, choices: Sequence[int], many: int | None, macros_of: Callable, shared_limit: int
) -> Maps | None:
    """The best of some choices of rows. Of many taps a thread takes every second strip, where those are ``many``."""
    rows = min(choices, key=lambda rows: _instructions(problem, rows))
    strips = strips_of_plane(problem, rows)[1]
    least = -(-strips // (2 * THREADS))  # strips of a thread
    turns = [2, least] if least == 1 and many is not None and problem.taps > FEW_TAPS and strips >= many else [least]
    layouts = (_share(problem, Maps(0, rows, -(-strips // n)), macros_of, shared_limit) for n in turns)
    return next((maps for maps in layouts if maps is not None), None)


def _instructions(problem: Problem, rows: int) -> int:
    """Of a map, about: to multiply, to read windows, to write outputs."""
    filled, strips = _filled(problem), strips_of_plane(problem, rows)[1]
    window = 8 * filled.horizontal.s + filled.horizontal.k + 5
    return strips * (8 * rows * problem.taps + filled.vertical.span(filled.vertical.k, rows) * window + 16 * rows + 20)


def _share(problem: Problem, choice: Maps, macros_of: Callable, shared_limit: int) -> Maps | None:
    """With as many maps as a block holds; None where memory does not suffice or forbids."""
    maps = min(problem.channels, max(1, THREADS // choice.lanes))
    maps = next((m for m in (maps // 8 * 8, maps // 2 * 2) if m), maps)  # whole runs of 16 bytes, mostly
    choice = replace(choice, maps=maps)
    shared = macros_of(problem, choice)[1]
    if shared > min(SHARED_BYTES, shared_limit) or min(_run_vectors(problem, maps)) == 1:
        return None
    threads = 768 if problem.taps > FEW_TAPS and macros_of is conv_macros else 1024
    return replace(choice, resident=max(1, min(threads // choice.threads, (shared_limit + 1024) // (shared + 1024))))


def describe(problem: Problem, maps: Maps) -> str:
    return f"CUDA cores, {maps.maps} whole maps, {maps.rows} rows x 8 columns a thread"


def _grid(problem: Problem, maps: Maps, device: torch.device) -> tuple[int, int, list[int]]:
    """All blocks, those that share the images of a channel (they fill the device once), and the kernel's sizes."""
    channel_blocks = -(-problem.channels // maps.maps)
    slots = maps.resident * torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(1, min(problem.images, slots // channel_blocks))
    splits = -(-problem.images // -(-problem.images // wanted))
    return channel_blocks * splits, splits, [problem.images, problem.channels, *conv_sizes(problem), channel_blocks]


def plan_conv(
    problem: Problem,
    maps: Maps,
    source: Tensor,
    result_size: Sequence[int],
    memory_format: torch.memory_format,
    rotate: bool,
) -> Plan:
    """Forward or (``rotate``) input gradient: the plan takes the source, the weight and perhaps a bias."""
    macros, shared = conv_macros(problem, maps)
    blocks, splits, sizes = _grid(problem, maps, source.device)
    shape = {"blocks": blocks, "threads": maps.threads, "shared_bytes": shared}
    numbers = [*sizes, splits]
    return conv_plan("depthwise_maps", problem, macros, numbers, source, result_size, memory_format, rotate, **shape)


def plan_weight_grad(problem: Problem, maps: Maps, dy: Tensor, x: Tensor, weight_size, weight_stride) -> Plan:
    macros, shared = weight_grad_macros(problem, maps)
    blocks, splits, sizes = _grid(problem, maps, x.device)
    shape = {"blocks": blocks, "threads": maps.threads, "shared_bytes": shared}
    kernel = "depthwise_maps_weight_grad"
    return weight_grad_plan(kernel, problem, macros, sizes, splits, dy, x, weight_size, weight_stride, **shape)
