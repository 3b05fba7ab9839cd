"""Declarations of depthwise convolution's three operators: forward, input gradient and weight gradient.

They are linear in each of their two tensors and are each other's derivatives, so gradients of any order close over
them. Inside, one-dimensional data is viewed as ``[N, C, 1, L]``, and padding is (low, high) of each dimension in order; :mod:`flashdwc.ops.depthwise` is the
public face.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.backend import Backend, Cost, Plan
from ..core.op import Operator
from ..kernels import native, reference
from ..kernels.cpu import depthwise as cpu
from ..kernels.cpu import depthwise_formulations as formulations
from ..kernels.cpu.memory import keep_temporaries
from ..kernels.native import output_format
from ..kernels.reference import conv_output_size

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PRECISIONS = ("auto", "ieee", "tf32")


# --- what the arguments must be ----------------------------------------------------------------------------------------


def is_dense(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_nested


def check_tensors(first: str, x: Tensor, **others: Tensor | None) -> None:
    for name, t in {first: x, **others}.items():
        if t is None:
            continue
        if not is_dense(t):
            raise TypeError(
                f"{name}: expected a dense tensor, got {'a nested one' if t.is_nested else f'layout {t.layout}'}"
            )
        if t.dtype not in DTYPES:
            raise TypeError(f"{name}: expected dtype float16, bfloat16, float32 or float64, got {t.dtype}")
        if t.dtype != x.dtype:
            raise TypeError(f"{name}: expected the dtype of {first}, {x.dtype}, got dtype {t.dtype}")
        if t.device != x.device:
            raise ValueError(f"{name}: expected the device of {first}, {x.device}, got device {t.device}")


def _check_geometry(
    spatial: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    precision: str,
) -> None:
    for name, values in (("stride", stride), ("dilation", dilation), ("kernel size", kernel)):
        if any(v < 1 for v in values):
            raise ValueError(f"{name}: expected positive numbers, got {tuple(values)}")
    if any(p < 0 for p in padding):
        raise ValueError(f"padding: expected non-negative numbers, got {tuple(padding)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected None, 'ieee' or 'tf32', got {precision!r}")
    for i, (n, k, d) in enumerate(zip(spatial, kernel, dilation)):
        padded, reach = n + padding[2 * i] + padding[2 * i + 1], d * (k - 1) + 1
        if padded >= 2**62:
            raise ValueError(f"padding: expected a padded input smaller than 2^62, got size {padded} of dimension {i}")
        if padded < reach:
            raise ValueError(
                f"weight: expected a kernel that fits the padded input, got extent {reach} (size {k}, dilation {d}) "
                f"over padded size {padded} of spatial dimension {i} (input {tuple(spatial)})"
            )


def _check_channels(channels: int, w: Sequence[int], b: Tensor | None = None) -> None:
    if w[1] != 1 or channels == 0 or w[0] == 0 or w[0] % channels:
        expected = f"[{channels} * multiplier, 1, *kernel] for an input of {channels} channels"
        raise ValueError(f"weight: expected shape {expected}, got {tuple(w)}")
    if b is not None and tuple(b.shape) != (w[0],):
        raise ValueError(f"bias: expected shape ({w[0]},), one for each output channel, got {tuple(b.shape)}")


def _check_forward(x, w, b, stride, padding, dilation, precision, impl) -> None:
    check_tensors("input", x, weight=w, bias=b)
    _check_channels(x.shape[1], w.shape, b)
    _check_geometry(x.shape[2:], w.shape[2:], stride, padding, dilation, precision)


def _check_grad_size(dy: Tensor, x: Sequence[int], w: Sequence[int], stride, padding, dilation, precision) -> None:
    _check_channels(x[1], w)
    _check_geometry(x[2:], w[2:], stride, padding, dilation, precision)
    expected = (x[0], w[0], *conv_output_size(x[2:], w[2:], stride, padding, dilation))
    if tuple(dy.shape) != expected:
        raise ValueError(f"grad_output: expected shape {expected}, got {tuple(dy.shape)}")


def _check_input_grad(dy, w, input_size, stride, padding, dilation, precision, impl) -> None:
    check_tensors("grad_output", dy, weight=w)
    _check_grad_size(dy, input_size, w.shape, stride, padding, dilation, precision)


def _check_weight_grad(dy, x, weight_size, weight_stride, stride, padding, dilation, precision, impl) -> None:
    check_tensors("grad_output", dy, input=x)
    _check_grad_size(dy, x.shape, weight_size, stride, padding, dilation, precision)


# --- what the results look like ----------------------------------------------------------------------------------------


def _fake_forward(x, w, b, stride, padding, dilation, precision, impl) -> Tensor:
    size = conv_output_size(x.shape[2:], w.shape[2:], stride, padding, dilation)
    return torch.empty(
        (x.shape[0], w.shape[0], *size), dtype=x.dtype, device=x.device, memory_format=output_format(x, w)
    )


def _fake_input_grad(dy, w, input_size, stride, padding, dilation, precision, impl) -> Tensor:
    return torch.empty(tuple(input_size), dtype=dy.dtype, device=dy.device, memory_format=output_format(dy, w))


def _fake_weight_grad(dy, x, weight_size, weight_stride, stride, padding, dilation, precision, impl) -> Tensor:
    return torch.empty_strided(tuple(weight_size), tuple(weight_stride), dtype=dy.dtype, device=dy.device)


def packed_strides(size: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides for a weight's gradient: the weight's own where its memory is packed in order (so that ``grad`` and
    parameter agree to the letter, size-1 dimensions included), else those of a contiguous tensor."""
    contiguous: list[int] = []
    expected = 1
    for n in reversed(size):
        contiguous.insert(0, expected)
        expected *= n
    for n, s, c in zip(size, strides, contiguous):
        if n != 1 and s != c:
            return tuple(contiguous)
    return tuple(strides)


# --- gradients ---------------------------------------------------------------------------------------------------------


def _save(ctx: Any, tensors: Sequence[Tensor], constants: tuple) -> None:
    """Keeps of the two factors only the one that the other's gradient needs, and what the other looks like."""
    first, second = tensors[:2]
    need_first, need_second, *_ = ctx.needs_input_grad
    ctx.kept = constants
    if need_first and need_second:
        ctx.save_for_backward(first, second)
    else:
        ctx.save_for_backward(first if need_second else None, second if need_first else None)
        ctx.looks = first.shape, second.shape, second.stride()


def _wanted(ctx: Any) -> tuple[bool, ...]:
    """Which gradients this backward pass asks for: of those that could be, perhaps one, as in ``torch.autograd.grad(y, x)``."""
    need = ctx.needs_input_grad
    if need.count(True) == 1:
        return need
    return tuple(possible and _engine_wants(ctx, i) for i, possible in enumerate(need))


def _engine_wants(ctx: Any, i: int) -> bool:
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[i][0])
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return True  # a leaf that torch.autograd.grad was asked for, or a context without a graph


def _looks(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple:
    """Size of the first factor, size and strides of the second."""
    if first is None or second is None:
        return ctx.looks
    return first.shape, second.shape, second.stride()


def _gradient_of_weight(dy: Tensor, x: Tensor, size: Sequence[int], strides: Sequence[int], geometry: tuple) -> Tensor:
    return weight_grad(dy, x, size, packed_strides(size, strides), *geometry)


def _backward_forward(ctx: Any, g: Tensor) -> tuple:
    x, w = ctx.saved_tensors
    need, geometry = _wanted(ctx), ctx.kept
    input_size, weight_size, weight_stride = _looks(ctx, x, w)
    if need[0] and need[1] and 0 in g.stride():  # as of ``y.sum()``: copied here once, not by each gradient
        g = g.contiguous(memory_format=native.output_format(x, w))
    dx = input_grad(g, w, input_size, *geometry) if need[0] else None
    dw = _gradient_of_weight(g, x, weight_size, weight_stride, geometry) if need[1] else None
    db = g.sum([0, *range(2, g.dim())]) if need[2] else None
    return dx, dw, db


def _backward_input_grad(ctx: Any, g: Tensor) -> tuple:
    dy, w = ctx.saved_tensors
    need, (_, *geometry) = _wanted(ctx), ctx.kept
    _, weight_size, weight_stride = _looks(ctx, dy, w)
    ddy = forward(g, w, None, *geometry) if need[0] else None
    dw = _gradient_of_weight(dy, g, weight_size, weight_stride, tuple(geometry)) if need[1] else None
    return ddy, dw


def _backward_weight_grad(ctx: Any, g: Tensor) -> tuple:
    dy, x = ctx.saved_tensors
    need, (_, _, *geometry) = _wanted(ctx), ctx.kept
    _, input_size, _ = _looks(ctx, dy, x)
    ddy = forward(x, g, None, *geometry) if need[0] else None
    dx = input_grad(dy, g, input_size, *geometry) if need[1] else None
    return ddy, dx


def _jvp_forward(primals: Sequence[Tensor], tangents: Sequence[Tensor | None], *geometry: Any) -> Tensor:
    (x, w, b), (tx, tw, tb) = primals, tangents
    bias = None if tb is None else tb.view(-1, *[1] * (x.dim() - 2))
    terms = [forward(tx, w, None, *geometry)] if tx is not None else []
    terms += [forward(x, tw, None, *geometry)] if tw is not None else []
    total = sum(terms[1:], terms[0]) if terms else torch.zeros_like(forward(x, w, b, *geometry))
    return total if bias is None else total + bias


def _bilinear_jvp(operator: Any) -> Any:
    def jvp(primals: Sequence[Tensor], tangents: Sequence[Tensor | None], *constants: Any) -> Tensor:
        (p, q), (tp, tq) = primals, tangents
        terms = [operator(tp, q, *constants)] if tp is not None else []
        terms += [operator(p, tq, *constants)] if tq is not None else []
        return sum(terms[1:], terms[0])

    return jvp


# --- vmap: a batch of inputs joins the batch, a batch of weights joins the channels -------------------------------------


def _into(t: Tensor | None, batch_dim: int | None, batch: int, dim: int) -> Tensor | None:
    """Folds the vmapped dimension of ``t`` into its dimension ``dim`` (expands it where there is none)."""
    if t is None:
        return None
    t = (
        t.unsqueeze(dim).expand(*t.shape[:dim], batch, *t.shape[dim:])
        if batch_dim is None
        else t.movedim(batch_dim, dim)
    )
    return t.flatten(dim, dim + 1)


def _per_sample(size: Sequence[int], batch_dim: int | None, dim: int) -> int:
    """Size of dimension ``dim`` of one of the vmapped tensors."""
    return [n for i, n in enumerate(size) if i != batch_dim][dim]


def _vmap_forward(info: Any, in_dims: tuple, x, w, b, *geometry: Any) -> tuple[Tensor, int]:
    n, (dx, dw, db) = info.batch_size, in_dims[:3]
    if dw is None and db is None:
        images = _per_sample(x.shape, dx, 0)
        return forward(_into(x, dx, n, 0), w, b, *geometry).unflatten(0, (n, images)), 0
    y = forward(_into(x, dx, n, 1), _into(w, dw, n, 0), _into(b, db, n, 0), *geometry)
    return y.unflatten(1, (n, _per_sample(w.shape, dw, 0))), 1


def _vmap_input_grad(info: Any, in_dims: tuple, dy, w, input_size, *geometry: Any) -> tuple[Tensor, int]:
    n, (ddy, dw) = info.batch_size, in_dims[:2]
    images, channels, *spatial = input_size
    if dw is None:
        return input_grad(_into(dy, ddy, n, 0), w, (n * images, channels, *spatial), *geometry).unflatten(
            0, (n, images)
        ), 0
    dx = input_grad(_into(dy, ddy, n, 1), _into(w, dw, n, 0), (images, n * channels, *spatial), *geometry)
    return dx.unflatten(1, (n, channels)), 1


def _vmap_weight_grad(
    info: Any, in_dims: tuple, dy, x, weight_size, weight_stride, *geometry: Any
) -> tuple[Tensor, int]:
    n, (ddy, dx) = info.batch_size, in_dims[:2]
    size = (n * weight_size[0], *weight_size[1:])
    strides = torch.empty(size, device="meta").stride()
    dw = weight_grad(_into(dy, ddy, n, 1), _into(x, dx, n, 1), size, strides, *geometry)
    return dw.unflatten(0, (n, weight_size[0])), 0


# --- the CUDA backend --------------------------------------------------------------------------------------------------


def _on_cuda(operator: str) -> Backend:
    """Its modules are imported by the first call with CUDA tensors, as they take half of what ``import flashdwc`` would."""

    def backend() -> Backend:
        from ..kernels.cuda import depthwise

        return getattr(depthwise, operator)

    def why_not(x: Tensor, *rest: Any) -> str | None:
        return backend().why_not(x, *rest) if x.is_cuda else f"the tensors are on {x.device}"

    return Backend(
        "cuda",
        why_not,
        lambda *args: backend().plan(*args),
        describe=lambda *args: backend().describe(*args),
        alternatives=lambda *args: backend().alternatives(*args),
    )


# --- the CPU backend ---------------------------------------------------------------------------------------------------


def _on_cpu(
    plan: Callable[..., Plan],
    describe: Callable[..., str],
    plan_for_autograd: Callable[..., Plan | None] = lambda *args: None,
) -> Backend:
    def why_not(x: Tensor, *_: Any) -> str | None:
        return None if x.device.type == "cpu" else f"the tensors are on {x.device}"

    def plan_with_memory(*args: Any) -> Plan:
        keep_temporaries()
        return plan(*args)

    return Backend("cpu", why_not, plan_with_memory, describe=describe, plan_for_autograd=plan_for_autograd)


def _plan_forward_on_cpu(x, w, b, stride, padding, dilation, *_: Any) -> Plan:
    return cpu.prepare_forward(x, w, stride, padding, dilation)


def _plan_forward_for_autograd(x, w, b, stride, padding, dilation, *_: Any) -> Plan | None:
    return cpu.prepare_forward_for_autograd(x, w, stride, padding, dilation)


def _plan_input_grad_on_cpu(dy, w, input_size, stride, padding, dilation, *_: Any) -> Plan:
    return cpu.prepare_input_grad(dy, w, input_size, stride, padding, dilation)


def _plan_weight_grad_on_cpu(dy, x, weight_size, weight_stride, stride, padding, dilation, *_: Any) -> Plan:
    return cpu.prepare_weight_grad(x, weight_size, weight_stride, stride, padding, dilation)


# --- declarations ------------------------------------------------------------------------------------------------------


def _cost(*sizes: Sequence[int], taps: Sequence[int], positions: Sequence[int], dtype: torch.dtype) -> Cost:
    """``sizes``: of all operands and the result; ``positions``: size of the forward's output."""
    numel = sum(math.prod(s) for s in sizes)
    return Cost(bytes=numel * dtype.itemsize, flops=2 * math.prod(positions) * math.prod(taps))


def _cost_forward(x, w, b, *geometry) -> Cost:
    y = _fake_forward(x.to("meta"), w.to("meta"), b, *geometry).shape
    return _cost(x.shape, w.shape, y, taps=w.shape[2:], positions=y, dtype=x.dtype)


def _cost_input_grad(dy, w, input_size, *_) -> Cost:
    return _cost(dy.shape, w.shape, input_size, taps=w.shape[2:], positions=dy.shape, dtype=dy.dtype)


def _cost_weight_grad(dy, x, weight_size, *_) -> Cost:
    return _cost(dy.shape, x.shape, weight_size, taps=weight_size[2:], positions=dy.shape, dtype=dy.dtype)


def _gradients_of_forward(x, w, b, *geometry) -> list[tuple[Operator, tuple]]:
    dy = _fake_forward(x, w, b, *geometry)
    constants = geometry[:-1]
    return [
        (input_grad, (dy, w, tuple(x.shape), *constants, "auto")),
        (weight_grad, (dy, x, tuple(w.shape), packed_strides(w.shape, w.stride()), *constants, "auto")),
    ]


def _shapes() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple, tuple, tuple]]:
    """Input size, weight size, stride, padding, dilation: small cases that touch every branch."""
    yield (2, 3, 9, 8), (3, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1)
    yield (1, 8, 7, 7), (8, 1, 7, 7), (1, 1), (3, 3, 3, 3), (1, 1)
    yield (2, 4, 10, 7), (8, 1, 3, 5), (2, 1), (0, 2, 2, 1), (1, 2)
    yield (2, 1, 6, 5), (2, 1, 2, 2), (2, 3), (1, 0, 0, 1), (1, 1)
    yield (1, 2, 1, 12), (2, 1, 1, 4), (1, 1), (0, 0, 3, 0), (1, 1)
    yield (1, 2, 4, 5, 6), (4, 1, 3, 2, 3), (1, 2, 1), (1, 1, 0, 1, 1, 1), (1, 1, 2)


def _tensor(size: Sequence[int], device: Any, dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(size), dtype=torch.float64).to(device, dtype)


def _samples_forward(device: Any, dtype: torch.dtype) -> Iterator[tuple]:
    for i, (x, w, *geometry) in enumerate(_shapes()):
        b = _tensor(w[:1], device, dtype) if i % 2 else None
        yield _tensor(x, device, dtype), _tensor(w, device, dtype), b, *geometry, "auto", "auto"


def _samples_input_grad(device: Any, dtype: torch.dtype) -> Iterator[tuple]:
    for x, w, *geometry in _shapes():
        dy = (x[0], w[0], *conv_output_size(x[2:], w[2:], *geometry))
        yield _tensor(dy, device, dtype), _tensor(w, device, dtype), x, *geometry, "auto", "auto"


def _samples_weight_grad(device: Any, dtype: torch.dtype) -> Iterator[tuple]:
    for x, w, *geometry in _shapes():
        dy = (x[0], w[0], *conv_output_size(x[2:], w[2:], *geometry))
        strides = torch.empty(w).stride()
        yield _tensor(dy, device, dtype), _tensor(x, device, dtype), w, strides, *geometry, "auto", "auto"


_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, str precision, str impl"

forward: Operator = Operator(
    f"depthwise_conv(Tensor x, Tensor w, Tensor? b, {_GEOMETRY}) -> Tensor",
    tensors=3,
    reference=reference.depthwise_conv,
    backends=(
        _on_cuda("forward"),
        _on_cpu(_plan_forward_on_cpu, formulations.describe_forward, _plan_forward_for_autograd),
        native.forward,
    ),
    check=_check_forward,
    fake=_fake_forward,
    setup_context=_save,
    backward=_backward_forward,
    jvp=_jvp_forward,
    vmap=_vmap_forward,
    cost=_cost_forward,
    samples=_samples_forward,
    casts=True,
    gradients=_gradients_of_forward,
)

input_grad: Operator = Operator(
    f"depthwise_conv_input_grad(Tensor dy, Tensor w, SymInt[] input_size, {_GEOMETRY}) -> Tensor",
    tensors=2,
    reference=reference.depthwise_conv_input_grad,
    backends=(
        _on_cuda("input_grad"),
        _on_cpu(_plan_input_grad_on_cpu, formulations.describe_input_grad),
        native.input_grad,
    ),
    check=_check_input_grad,
    fake=_fake_input_grad,
    setup_context=_save,
    backward=_backward_input_grad,
    jvp=_bilinear_jvp(lambda *args: input_grad(*args)),
    vmap=_vmap_input_grad,
    cost=_cost_input_grad,
    samples=_samples_input_grad,
)

weight_grad: Operator = Operator(
    f"depthwise_conv_weight_grad(Tensor dy, Tensor x, SymInt[] weight_size, SymInt[] weight_stride, {_GEOMETRY}) -> Tensor",
    tensors=2,
    reference=reference.depthwise_conv_weight_grad,
    backends=(
        _on_cuda("weight_grad"),
        _on_cpu(_plan_weight_grad_on_cpu, formulations.describe_weight_grad),
        native.weight_grad,
    ),
    check=_check_weight_grad,
    fake=_fake_weight_grad,
    setup_context=_save,
    backward=_backward_weight_grad,
    jvp=_bilinear_jvp(lambda *args: weight_grad(*args)),
    vmap=_vmap_weight_grad,
    cost=_cost_weight_grad,
    samples=_samples_weight_grad,
)
