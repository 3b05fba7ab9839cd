"""What every operator promises, driven by nothing but its declaration and its samples."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import LAYOUTS, assert_as_accurate, poison
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import flashdwc.ops
from flashdwc.core.op import Operator
from flashdwc.kernels.reference import double

MODULES = [importlib.import_module(f"flashdwc.ops.{m.name}") for m in pkgutil.iter_modules(flashdwc.ops.__path__)]
OPERATORS = {o.name: o for module in MODULES for o in vars(module).values() if isinstance(o, Operator)}
SAMPLES = [(name, i) for name, o in OPERATORS.items() for i, _ in enumerate(o.samples("cpu", torch.float32))]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

each_operator = pytest.mark.parametrize("name", OPERATORS)
each_sample = pytest.mark.parametrize(("name", "index"), SAMPLES, ids=[f"{name}-{i}" for name, i in SAMPLES])


def sample(name: str, index: int, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Operator, tuple]:
    """Of the type that the device's own kernels are for, where none is given."""
    operator = OPERATORS[name]
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    return operator, list(operator.samples(device, dtype))[index]


def on_tensors(function: Callable[[Tensor], Any], operator: Operator, args: tuple) -> tuple:
    """Applies a function to the tensors that there are."""
    tensors = (None if t is None else function(t) for t in args[: operator.tensors])
    return (*tensors, *args[operator.tensors :])


def differentiable(operator: Operator, args: tuple) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The operator as a function of the tensors that there are, and these, as leaves."""
    there = [i for i in range(operator.tensors) if args[i] is not None]

    def function(*tensors: Tensor) -> Tensor:
        filled = list(args)
        for i, t in zip(there, tensors):
            filled[i] = t
        return operator(*filled)

    return function, [args[i].detach().clone().requires_grad_() for i in there]


def value_and_gradients(function: Callable[..., Tensor], leaves: list[Tensor], g: Tensor | None = None) -> list[Tensor]:
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y) if g is None else g)]


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs))


def same_metadata(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_there_are_operators_and_each_has_samples():
    assert {"depthwise_conv", "depthwise_conv_input_grad", "depthwise_conv_weight_grad"} <= set(OPERATORS)
    assert {name for name, _ in SAMPLES} == set(OPERATORS)


# --- values and metadata ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@each_sample
def test_value(name, index, dtype, device):
    operator, args = sample(name, index, device, dtype)
    poison(operator(*args).shape, like=args[0])
    theirs = operator(*args[:-1], "torch")
    assert_as_accurate(operator(*args), theirs, double(operator.reference, *args))


@pytest.mark.parametrize("layout", LAYOUTS)
@each_sample
def test_layout_changes_no_value_and_fake_metadata_are_the_real_ones(name, index, layout, device):
    operator, args = sample(name, index, device)
    oracle, theirs = double(operator.reference, *args), operator(*args[:-1], "torch")
    args = on_tensors(lambda t: LAYOUTS[layout](t) if t.dim() >= 4 else t, operator, args)
    y = operator(*args)
    assert_as_accurate(y, theirs, oracle)
    assert same_metadata(y, operator.fake(*args))
    with FakeTensorMode() as mode:
        faked = operator(*on_tensors(mode.from_tensor, operator, args))
    assert same_metadata(y, faked)
    meta = operator(*on_tensors(lambda t: t.to("meta"), operator, args))
    assert (meta.shape, meta.dtype) == (y.shape, y.dtype)


@each_sample
def test_explicit_backends_agree_or_say_why_not(name, index, device):
    operator, args = sample(name, index, device)
    oracle, theirs = double(operator.reference, *args), operator(*args[:-1], "torch")
    for backend in operator.backends:
        if (why := backend.why_not(*args)) is None:
            assert_as_accurate(operator(*args[:-1], backend.name), theirs, oracle)
        else:
            with pytest.raises(flashdwc.UnsupportedError) as error:
                operator(*args[:-1], backend.name)
            assert why in str(error.value)


@each_sample
def test_results_are_no_views_on_whichever_way(name, index, device):
    operator, args = sample(name, index, device)
    for impl in ("auto", "auto", "torch", "torch"):  # the second of each is recalled
        assert not operator(*args[:-1], impl)._is_view()


@each_sample
def test_new_data_in_the_same_shapes_reuses_the_plan(name, index, device):
    operator, args = sample(name, index, device, torch.float64)
    operator(*args)
    plans = len(operator._plans)
    args = on_tensors(lambda t: torch.randn_like(t), operator, args)
    assert_as_accurate(operator(*args), operator(*args[:-1], "torch"), double(operator.reference, *args))
    assert len(operator._plans) <= plans + 1  # the call with "torch"


# --- autograd --------------------------------------------------------------------------------------------------------


@each_sample
def test_gradients_of_first_and_second_order(name, index, device):
    operator, args = sample(name, index, device, torch.float64)
    function, leaves = differentiable(operator, args)
    fast = sum(t.numel() for t in leaves) > 400  # a full numerical jacobian takes two calls for each element
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True, fast_mode=fast)
    assert torch.autograd.gradgradcheck(function, leaves, check_batched_grad=True, fast_mode=True)


@each_sample
def test_registered_path_and_eager_path_give_the_same_bits(name, index, device):
    operator, args = sample(name, index, device)
    function, leaves = differentiable(operator, args)
    eager = value_and_gradients(function, leaves, g := torch.randn_like(function(*leaves)))
    registered, leaves_ = differentiable(_Registered(operator), args)
    assert same_bits(eager, value_and_gradients(registered, leaves_, g))


class _Registered:
    """Calls an operator as the dispatcher does."""

    def __init__(self, operator: Operator) -> None:
        self.tensors, self._registered = operator.tensors, operator._registered

    def __call__(self, *args: Any) -> Tensor:
        return self._registered(*args)


@each_sample
def test_opcheck(name, index, device):
    operator, args = sample(name, index, device)
    torch.library.opcheck(operator._registered, on_tensors(lambda t: t.requires_grad_(), operator, args))


@each_sample
def test_vmap_over_each_tensor_and_all_together(name, index, device):
    operator, args = sample(name, index, device, torch.float64)
    function, leaves = differentiable(operator, args)
    leaves = [t.detach() for t in leaves]
    stacks = [torch.stack([t, -2 * t, torch.randn_like(t)], -1) for t in leaves]
    for mapped in [*([i] for i in range(len(leaves))), range(len(leaves))]:
        operands = [stacks[i] if i in mapped else leaves[i] for i in range(len(leaves))]
        in_dims = tuple(-1 if i in mapped else None for i in range(len(leaves)))
        y = torch.func.vmap(function, in_dims)(*operands)
        for j in range(3):
            expected = function(*(t[..., j] if i in mapped else t for i, t in enumerate(operands)))
            torch.testing.assert_close(y[j], expected)


@each_operator
def test_per_sample_gradients(name, device):
    operator, args = sample(name, 0, device, torch.float64)
    function, leaves = differentiable(operator, args)
    stacks = [torch.stack([t.detach(), torch.randn_like(t)]) for t in leaves]
    positions = tuple(range(len(leaves)))
    gradient = torch.func.grad(lambda *tensors: function(*tensors).pow(2).sum(), positions)
    together = torch.func.vmap(gradient)(*stacks)
    for j in range(2):
        torch.testing.assert_close([t[j] for t in together], list(gradient(*(s[j] for s in stacks))))


@each_operator
def test_nothing_is_recorded_where_no_gradient_is_wanted(name, device):
    operator, args = sample(name, 0, device)
    assert not operator(*args).requires_grad
    function, leaves = differentiable(operator, args)
    with torch.no_grad():
        assert function(*leaves).grad_fn is None
    with torch.inference_mode():
        assert function(*leaves).is_inference()


# --- tracers ---------------------------------------------------------------------------------------------------------


@each_sample
def test_compile_without_a_graph_break(name, index, device):
    operator, args = sample(name, index, device)
    function, leaves = differentiable(operator, args)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    g = torch.randn_like(function(*leaves))
    assert same_bits(value_and_gradients(function, leaves, g), value_and_gradients(compiled, leaves, g))


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
@each_operator
def test_compile_with_inductor(name, device):
    operator, args = sample(name, 0, device)
    function, leaves = differentiable(operator, args)

    def around(*tensors: Tensor) -> Tensor:
        return function(*(t * 2 for t in tensors)).relu() + 1

    torch.compiler.reset()
    compiled = torch.compile(around, fullgraph=True)
    g = torch.randn_like(function(*leaves))
    torch.testing.assert_close(value_and_gradients(compiled, leaves, g), value_and_gradients(around, leaves, g))


@each_sample
def test_export(name, index, device):
    operator, args = sample(name, index, device)
    function, leaves = differentiable(operator, args)

    class Module(nn.Module):
        def forward(self, tensors: list[Tensor]) -> Tensor:
            return function(*tensors)

    tensors = [t.detach() for t in leaves]
    exported = torch.export.export(Module(), (tensors,))
    assert operator._registered in [node.target for node in exported.graph.nodes]
    assert torch.equal(exported.module()(tensors), function(*tensors))


@pytest.mark.parametrize("registered", [False, True])
@each_sample
def test_autocast(name, index, registered, device):
    operator, args = sample(name, index, device, torch.float32)
    call = operator._registered if registered else operator
    if not operator.casts:  # gradients keep their type, as PyTorch's do
        expected = operator(*args)
        with torch.autocast(device.type, torch.bfloat16):
            assert same_bits([call(*args)], [expected])
        return
    expected = operator(*on_tensors(lambda t: t.bfloat16(), operator, args))
    with torch.autocast(device.type, torch.bfloat16):
        assert same_bits([call(*args)], [expected])
        mixed = (args[0].bfloat16(), *args[1:])  # as behind a layer that autocast has already lowered
        assert same_bits([call(*mixed)], [expected])
        _, wide = sample(name, index, device, torch.float64)
        assert call(*wide).dtype == torch.float64
    function, leaves = differentiable(operator, args)
    with torch.autocast(device.type, torch.bfloat16):
        y = function(*leaves)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum(), leaves))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@each_sample
def test_cuda_graph(name, index, dtype):
    operator, args = sample(name, index, torch.device("cuda"), dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        operator(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = operator(*args)
    for t in args[: operator.tensors]:
        if t is not None:
            t.copy_(torch.randn_like(t))
    y.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(y, operator(*args), rtol=0, atol=0)
