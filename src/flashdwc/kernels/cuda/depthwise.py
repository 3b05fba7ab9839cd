"""The CUDA backends of depthwise convolution, 16 bit: which of the kernels runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core import jit
from ...core.backend import Backend, Plan
from ..native import output_format
from . import depthwise_direct as direct
from . import depthwise_maps as maps
from . import depthwise_pairs as pairs
from . import depthwise_planar as planar
from . import depthwise_stream as stream
from . import depthwise_tensor_core as tensor_core
from .depthwise_problem import Problem, forward_problem, input_grad_problem, weight_grad_problem
from .depthwise_tiles import conv_tile, weight_grad_tile


def _why_not_here(x: Tensor) -> str | None:
    if not x.is_cuda:
        return f"the tensors are on {x.device}"
    if x.dim() != 4:
        return "the kernels are two-dimensional"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels are for float16 and bfloat16, not {x.dtype}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the kernels need compute capability 8.0"
    return jit.why_unavailable()


# Which kernel is the fastest was measured on an H200.


def _conv_engine(problem: Problem, limit: int) -> Any:
    if pairs.conv_pairs(problem, limit) is not None:
        return pairs
    if stream.conv_stream(problem, limit) is not None:
        return stream
    if maps.conv_maps(problem, limit) is not None:
        return maps
    if planar.suits(problem):
        return planar
    narrow = problem.inner.vector < 4 or (problem.inner.vector == 4 and problem.outputs <= 4_000_000)
    return direct if _prefers_direct(problem, narrow) else tensor_core


def _weight_grad_engine(problem: Problem, limit: int) -> Any:
    if maps.weight_grad_maps(problem, limit) is not None:
        return maps
    if planar.suits_weight_grad(problem):
        return planar
    small = problem.outputs <= 1_000_000 and problem.horizontal.out <= 14
    return direct if _prefers_direct(problem, small or problem.inner.vector < 4) else tensor_core


def _prefers_direct(problem: Problem, tiles_suffer: bool) -> bool:
    """Few taps always; more where tiles are strided, read in small pieces or have too little to do."""
    few = problem.taps <= direct.FEW_TAPS
    return direct.why_not(problem) is None and (few or problem.strided or tiles_suffer)


def _backend(
    pose: Callable[..., Problem],
    plan_with: Callable[..., Plan],
    engine_of: Callable[[Problem, int], Any],
    layouts: dict[Any, Callable],
) -> Backend:
    """``pose`` turns the operator's arguments into a problem; ``engine_of`` chooses the kernel family that ``plan_with`` plans.

    ``layouts`` has for each family the function that lays the work of a problem out.
    """

    def why_not(*args: Any) -> str | None:
        if (why := _why_not_here(args[0])) is not None:
            return why
        problem, limit = pose(*args), tensor_core.shared_limit(args[0].device)
        if max(problem.images, problem.vertical.size, problem.horizontal.size, problem.horizontal.out) >= 2**31:
            return "a dimension of 2^31 or more"
        if problem.empty or engine_of(problem, limit) is not tensor_core:
            return None
        return tensor_core.why_no_tile(layouts[tensor_core](problem.folded, limit), problem.folded, limit)

    def plan(*args: Any) -> Plan:
        problem = pose(*args)
        return plan_with(engine_of(problem, tensor_core.shared_limit(args[0].device)), problem, *args)

    def describe(*args: Any) -> str:
        problem, limit = pose(*args), tensor_core.shared_limit(args[0].device)
        if problem.empty:
            return "nothing to compute"
        engine = engine_of(problem, limit)
        if engine is tensor_core:
            problem = problem.folded
        return engine.describe(problem, layouts[engine](problem, limit))

    return Backend("cuda", why_not, plan, describe=describe)


def _pose_forward(x: Tensor, w: Tensor, b: Tensor | None, stride, padding, dilation, *_: Any) -> Problem:
    return forward_problem(x, w, output_format(x, w), stride, padding, dilation)


def _pose_input_grad(dy: Tensor, w: Tensor, input_size, stride, padding, dilation, *_: Any) -> Problem:
    return input_grad_problem(dy, w, output_format(dy, w), input_size, stride, padding, dilation)


def _pose_weight_grad(dy: Tensor, x: Tensor, weight_size, weight_stride, stride, padding, dilation, *_: Any) -> Problem:
    return weight_grad_problem(dy, x, weight_size, stride, padding, dilation)


def _plan_forward(engine: Any, problem: Problem, x: Tensor, w: Tensor, *_: Any) -> Plan:
    size = (problem.images, problem.channels, problem.vertical.out, problem.horizontal.out)
    return _plan_conv(engine, problem, x, size, output_format(x, w), False)


def _plan_input_grad(engine: Any, problem: Problem, dy: Tensor, w: Tensor, input_size, *_: Any) -> Plan:
    return _plan_conv(engine, problem, dy, input_size, output_format(dy, w), True)


def _plan_conv(engine: Any, problem: Problem, source: Tensor, size, memory_format, rotate: bool) -> Plan:
    if problem.empty:
        return lambda *_: torch.empty(
            tuple(size), dtype=source.dtype, device=source.device, memory_format=memory_format
        )
    return engine.plan_conv(problem, source, size, memory_format, rotate)


def _plan_weight_grad(engine: Any, problem: Problem, dy: Tensor, x: Tensor, size, strides, *_: Any) -> Plan:
    if problem.empty:
        return lambda *_: torch.empty_strided(size, strides, dtype=dy.dtype, device=dy.device).zero_()
    return engine.plan_weight_grad(problem, dy, x, size, strides)


_CONV: dict[Any, Callable] = {
    pairs: pairs.conv_pairs,
    stream: stream.conv_stream,
    maps: maps.conv_maps,
    planar: lambda problem, _: planar.conv_strip(problem),
    direct: lambda problem, _: direct.conv_strip(problem),
    tensor_core: conv_tile,
}
_WEIGHT_GRAD: dict[Any, Callable] = {
    maps: maps.weight_grad_maps,
    planar: lambda problem, _: planar.weight_grad_strip(problem),
    direct: lambda problem, _: direct.weight_grad_strip(problem),
    tensor_core: weight_grad_tile,
}
forward = _backend(_pose_forward, _plan_forward, _conv_engine, _CONV)
input_grad = _backend(_pose_input_grad, _plan_input_grad, _conv_engine, _CONV)
weight_grad = _backend(_pose_weight_grad, _plan_weight_grad, _weight_grad_engine, _WEIGHT_GRAD)
