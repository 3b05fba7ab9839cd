"""The CUDA backends of depthwise convolution, 16 bit: which of the kernels runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import jit
from ...core.backend import Backend, Plan
from ...core.tune import Alternative, Alternatives, choice
from ..native import output_format
from . import depthwise_direct as direct
from . import depthwise_few as few
from . import depthwise_images as images
from . import depthwise_maps as maps
from . import depthwise_octets as octets
from . import depthwise_planar as planar
from . import depthwise_tensor_core as tensor_core
from . import depthwise_transposed as transposed
from . import depthwise_warps as warps
from .depthwise_problem import Problem, forward_problem, input_grad_problem, weight_grad_problem
from .depthwise_tiles import conv_tile, weight_grad_tile


def _why_not_here(x: Tensor) -> str | None:
    """Of a tensor on CUDA: for others the operators do not even import this module."""
    if x.dim() != 4:
        return "the kernels are two-dimensional"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels are for float16 and bfloat16, not {x.dtype}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the kernels need compute capability 8.0"
    if (why := jit.why_unavailable()) is not None:
        warnings.warn(f"flashdwc's CUDA kernels cannot run, PyTorch's run instead: {why}", stacklevel=2)
    return why


class Way(NamedTuple):
    """How a problem is computed: by which kernel family, in which of its layouts."""

    engine: Any
    layout: Any

    @property
    def name(self) -> str:
        return f"{self.engine.__name__.rpartition('.')[2]}: {self.layout}"


def _all_ways(problem: Problem, limit: int, layouts: str) -> list[Way]:
    """``layouts``: the engines' function that lists them."""
    engines = (engine for engine in ENGINES if hasattr(engine, layouts))
    return [Way(engine, layout) for engine in engines for layout in getattr(engine, layouts)(problem, limit)]


ENGINES = (few, images, octets, transposed, maps, warps, planar, direct, tensor_core)

# Which way is the fastest was measured on an H200.


def _conv_way(problem: Problem, limit: int) -> Way:
    for engine, choose in (
        (few, few.conv_few),
        (images, images.conv_images),
        (octets, octets.conv_octets),
        (transposed, transposed.conv_transposed),
        (maps, maps.conv_maps),
        (warps, warps.conv_warps),
    ):
        if (layout := choose(problem, limit)) is not None:
            return Way(engine, layout)
    if planar.suits(problem):
        return Way(planar, planar.conv_strip(problem))
    small = problem.outputs <= 320_000 or (problem.inner.vector == 4 and problem.outputs <= 4_000_000)
    if _prefers_direct(problem, small or problem.inner.vector < 4):
        return Way(direct, direct.conv_strip(problem))
    return Way(tensor_core, conv_tile(problem.folded, limit))


def _weight_grad_way(problem: Problem, limit: int) -> Way:
    for engine, choose in (
        (images, images.weight_grad_images),
        (octets, octets.weight_grad_octets),
        (transposed, transposed.weight_grad_transposed),
        (maps, maps.weight_grad_maps),
        (warps, warps.weight_grad_warps),
    ):
        if (layout := choose(problem, limit)) is not None:
            return Way(engine, layout)
    if planar.suits_weight_grad(problem):
        return Way(planar, planar.weight_grad_strip(problem))
    small = problem.outputs <= 1_000_000 and problem.horizontal.out <= 14
    if _prefers_direct(problem, small or problem.inner.vector < 4):
        return Way(direct, direct.weight_grad_strip(problem))
    return Way(tensor_core, weight_grad_tile(problem.folded, limit))


def _prefers_direct(problem: Problem, tiles_suffer: bool) -> bool:
    """Few taps always; more where tiles are strided, read in small pieces or have too little to do."""
    few = problem.taps <= direct.FEW_TAPS
    return direct.why_not(problem) is None and (few or problem.strided or tiles_suffer)


def _backend(
    pose: Callable[..., Problem], rule: Callable[[Problem, int], Way], layouts: str, plan_with: Callable[..., Plan]
) -> Backend:
    """``pose`` turns the operator's arguments into a problem, for which a measurement or ``rule`` chooses a way, which ``plan_with`` plans."""

    def name_of(problem: Problem) -> str:
        return f"{layouts.removesuffix('_layouts')} {problem}"

    def way_of(problem: Problem, device: torch.device) -> Way:
        limit = tensor_core.shared_limit(device)
        measured = choice(device, name_of(problem))
        ways = _all_ways(problem, limit, layouts) if measured else []
        return next((way for way in ways if way.name == measured), None) or rule(problem, limit)

    def why_not(*args: Any) -> str | None:
        if (why := _why_not_here(args[0])) is not None:
            return why
        problem, device = pose(*args), args[0].device
        if max(problem.images, problem.vertical.size, problem.horizontal.size, problem.horizontal.out) >= 2**31:
            return "a dimension of 2^31 or more"
        if problem.empty:
            return None
        engine, layout = way_of(problem, device)
        if engine is not tensor_core:
            return None
        return tensor_core.why_no_tile(layout, problem.folded, tensor_core.shared_limit(device))

    def plan(*args: Any) -> Plan:
        problem = pose(*args)
        return plan_with(None if problem.empty else way_of(problem, args[0].device), problem, *args)

    def describe(*args: Any) -> str:
        problem = pose(*args)
        if problem.empty:
            return "nothing to compute"
        engine, layout = way_of(problem, args[0].device)
        return engine.describe(problem, layout)

    def alternatives(*args: Any) -> Alternatives | None:
        problem, device = pose(*args), args[0].device
        if problem.empty:
            return None
        ways = {way.name: way for way in _all_ways(problem, tensor_core.shared_limit(device), layouts)}
        chosen = way_of(problem, device)
        ways = {chosen.name: chosen, **ways}
        plans = (Alternative(name, partial(plan_with, way, problem, *args)) for name, way in ways.items())
        return Alternatives(name_of(problem), chosen.name, tuple(plans))

    return Backend("cuda", why_not, plan, describe=describe, alternatives=alternatives)


def _pose_forward(x: Tensor, w: Tensor, b: Tensor | None, stride, padding, dilation, *_: Any) -> Problem:
    return forward_problem(x, w, output_format(x, w), stride, padding, dilation)


def _pose_input_grad(dy: Tensor, w: Tensor, input_size, stride, padding, dilation, *_: Any) -> Problem:
    return input_grad_problem(dy, w, output_format(dy, w), input_size, stride, padding, dilation)


def _pose_weight_grad(dy: Tensor, x: Tensor, weight_size, weight_stride, stride, padding, dilation, *_: Any) -> Problem:
    return weight_grad_problem(dy, x, weight_size, stride, padding, dilation)


def _plan_forward(way: Way | None, problem: Problem, x: Tensor, w: Tensor, *_: Any) -> Plan:
    size = problem.in_order((problem.images, problem.channels, problem.vertical.out, problem.horizontal.out))
    return _plan_conv(way, problem, x, size, output_format(x, w), False)


def _plan_input_grad(way: Way | None, problem: Problem, dy: Tensor, w: Tensor, input_size, *_: Any) -> Plan:
    return _plan_conv(way, problem, dy, input_size, output_format(dy, w), True)


def _plan_conv(way: Way | None, problem: Problem, source: Tensor, size, memory_format, rotate: bool) -> Plan:
    if way is None:
        return lambda *_: torch.empty(
            tuple(size), dtype=source.dtype, device=source.device, memory_format=memory_format
        )
    return way.engine.plan_conv(problem, way.layout, source, size, memory_format, rotate)


def _plan_weight_grad(way: Way | None, problem: Problem, dy: Tensor, x: Tensor, size, strides, *_: Any) -> Plan:
    if way is None:
        return lambda *_: torch.empty_strided(size, strides, dtype=dy.dtype, device=dy.device).zero_()
    return way.engine.plan_weight_grad(problem, way.layout, dy, x, size, strides)


forward = _backend(_pose_forward, _conv_way, "conv_layouts", _plan_forward)
input_grad = _backend(_pose_input_grad, _conv_way, "conv_layouts", _plan_input_grad)
weight_grad = _backend(_pose_weight_grad, _weight_grad_way, "weight_grad_layouts", _plan_weight_grad)
