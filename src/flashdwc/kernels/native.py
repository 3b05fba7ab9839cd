"""PyTorch's own kernels as a backend: the choice wherever they are the fastest, and the fallback for all else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ..core.backend import Backend, Plan

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {2: F.conv2d, 3: F.conv3d}


def _covers_everything(*args: object) -> None:
    return None


def symmetric(padding: Sequence[int]) -> bool:
    return tuple(padding[::2]) == tuple(padding[1::2])


def own(y: Tensor) -> Tensor:
    """The same elements, no view: what a plan returns."""
    return y if torch.compiler.is_compiling() or not y._is_view() else y.detach()


def pad(x: Tensor, padding: Sequence[int], mode: str = "constant") -> Tensor:
    """Padding given as (low, high) of each dimension, the first dimension first; zeros unless ``mode`` says other."""
    reversed_pairs = [p for i in reversed(range(0, len(padding), 2)) for p in padding[i : i + 2]]
    return F.pad(x, reversed_pairs, mode)


def _crop(x: Tensor, padding: Sequence[int]) -> Tensor:
    return pad(x, [-p for p in padding])


def suggests_channels_last(t: Tensor) -> bool:
    try:
        return like_channels_last(t.shape, t.stride())
    except TypeError:  # symbolic numbers have no hash
        return suggest_memory_format(t) is not torch.contiguous_format


@lru_cache(maxsize=4096)
def like_channels_last(size: Sequence[int], strides: Sequence[int]) -> bool:
    """c10's rule, ``is_channels_last_strides``. PyTorch's form of it in Python imports a thousand modules, which takes a second."""
    if len(size) not in CHANNELS_LAST or strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(size) - 1, 1, -1), 0):
        if size[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * size[d]
    return True


def output_format(a: Tensor, w: Tensor | None = None) -> torch.memory_format:
    """PyTorch's rule: channels_last where one of the operands suggests it (but not for float64 on CUDA)."""
    if a.is_cuda and a.dtype is torch.float64:
        return torch.contiguous_format
    suggested = any(t is not None and suggests_channels_last(t) for t in (a, w))
    return CHANNELS_LAST[a.dim()] if suggested else torch.contiguous_format


def _must_avoid_tf32(x: Tensor, precision: str) -> bool:
    """True where PyTorch's switches allow TF32 and the caller does not: only its contiguous kernels are always IEEE."""
    return x.is_cuda and x.dtype is torch.float32 and precision == "ieee"


def _plan_forward(x: Tensor, w: Tensor, b: Tensor | None, stride, padding, dilation, precision: str, impl: str) -> Plan:
    groups, spatial = x.shape[1], x.dim() - 2
    convolution = CONVOLUTIONS[spatial]
    ieee = _must_avoid_tf32(x, precision)
    even = symmetric(padding)
    low = padding[::2] if even else (0,) * spatial

    memory_format = output_format(x, w)

    def run(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if not even:
            x = pad(x, padding)
        if not ieee:
            y = convolution(x, w, b, stride, low, dilation, groups)
        else:
            cudnn = torch.backends.cudnn
            switches = (cudnn.benchmark, cudnn.deterministic, cudnn.enabled, False)
            x, w = x.contiguous(), w.contiguous()
            y = torch._convolution(x, w, b, stride, low, dilation, False, [0] * spatial, groups, *switches)
        return own(y.contiguous(memory_format=memory_format))

    return run


def _backward(dy: Tensor, x: Tensor, w: Tensor, geometry: tuple, ieee: bool, mask: list[bool]) -> list[Tensor]:
    stride, low, dilation = geometry
    if ieee:
        dy, x, w = dy.contiguous(), x.contiguous(), w.contiguous()
    return torch.ops.aten.convolution_backward(
        dy, x, w, None, stride, low, dilation, False, [0] * len(stride), x.shape[1], mask
    )


def _plan_input_grad(dy: Tensor, w: Tensor, input_size, stride, padding, dilation, precision: str, impl: str) -> Plan:
    ieee = _must_avoid_tf32(dy, precision)
    even = symmetric(padding)
    geometry = (stride, padding[::2] if even else (0,) * len(stride), dilation)
    spatial = [n + (0 if even else padding[2 * i] + padding[2 * i + 1]) for i, n in enumerate(input_size[2:])]
    size = (*input_size[:2], *spatial)
    memory_format = output_format(dy, w)

    def run(dy: Tensor, w: Tensor) -> Tensor:
        x = torch.empty(size, dtype=dy.dtype, device=dy.device, memory_format=memory_format)  # its layout decides
        dx = _backward(dy, x, w, geometry, ieee, [True, False, False])[0]
        return own((dx if even else _crop(dx, padding)).contiguous(memory_format=memory_format))

    return run


def _plan_weight_grad(
    dy: Tensor, x: Tensor, weight_size, weight_stride, stride, padding, dilation, precision, impl
) -> Plan:
    ieee = _must_avoid_tf32(dy, precision)
    even = symmetric(padding)
    geometry = (stride, padding[::2] if even else (0,) * len(stride), dilation)
    strides = tuple(weight_stride)
    sums_short = dy.is_cuda and dy.dim() == 5 and dy.dtype in (torch.float16, torch.bfloat16)

    def run(dy: Tensor, x: Tensor) -> Tensor:
        dtype = dy.dtype
        if sums_short:  # PyTorch's three-dimensional kernel would add in the type of its operands
            dy, x = dy.float(), x.float()
        w = dy.new_empty(weight_size)
        dw = _backward(dy, x if even else pad(x, padding), w, geometry, ieee, [False, True, False])[1].to(dtype)
        return own(dw if dw.stride() == strides else dw.contiguous().as_strided(weight_size, strides))

    return run


def _describe(*args: object) -> str:
    return "PyTorch's own kernel; its determinism switches apply"


forward = Backend("torch", _covers_everything, _plan_forward, describe=_describe)
input_grad = Backend("torch", _covers_everything, _plan_input_grad, describe=_describe)
weight_grad = Backend("torch", _covers_everything, _plan_weight_grad, describe=_describe)
