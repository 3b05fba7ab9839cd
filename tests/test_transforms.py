"""Transforms, modes and in-place changes around the operators: each test is a fault that once was there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import channels_last
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import flashdwc
from flashdwc import depthwise_conv1d, depthwise_conv2d, depthwise_conv_transpose2d
from flashdwc.kernels.cpu.depthwise_formulations import choose_for_autograd
from flashdwc.ops import depthwise_operators

X, W = torch.randn(1, 3, 6, 6), torch.randn(3, 1, 3, 3)


def ours(w: torch.Tensor) -> torch.Tensor:
    return depthwise_conv2d(X, w)


def test_tangents_survive_linearize_and_modes():
    expected = F.conv2d(X, W, groups=3)
    torch.testing.assert_close(torch.func.linearize(ours, W)[1](W), expected)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(torch.func.jvp(ours, (W,), (W,))[1], expected)
    negated = torch._neg_view(X)
    tangent = torch.func.jvp(lambda w: depthwise_conv2d(negated, w), (W,), (W,))[1]
    torch.testing.assert_close(tangent, -expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tangents_survive_compilation(backend):
    torch.compiler.reset()
    compiled = torch.compile(lambda w: torch.func.jvp(ours, (w,), (w,))[1], fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(W), F.conv2d(X, W, groups=3))


def test_compiles_with_sizes_in_a_tuple_of_padding():
    torch.compiler.reset()
    layer = torch.compile(
        flashdwc.nn.DepthwiseConv2dSame(3, 3, 3, 2, groups=3), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for height in (7, 8, 9):
        assert layer(torch.randn(2, 3, height, height + 3)).shape == (2, 3, (height + 1) // 2, (height + 4) // 2)
    causal = torch.compile(
        lambda x, w: depthwise_conv1d(x, w, causal=True), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for taps in (3, 4):
        x, w = torch.randn(2, 3, 9), torch.randn(3, 1, taps)
        torch.testing.assert_close(causal(x, w), depthwise_conv1d(x, w, causal=True))


def test_gradients_under_modes():
    def loss(w: torch.Tensor) -> torch.Tensor:
        return ours(w).sum()

    expected = torch.func.grad(loss)(W)
    with FlopCounterMode(display=False):
        torch.testing.assert_close(torch.func.grad(loss)(W), expected)
    torch.testing.assert_close(make_fx(torch.func.grad(loss))(W)(W), expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 4, padding="same", groups=8),
        nn.Conv2d(8, 8, 31, padding=15, groups=8),
        nn.Conv2d(8, 8, 3, padding=8, dilation=8, groups=8),
        nn.Conv2d(1, 1, 3, padding=1),
    ],
    ids=["even same", "wide", "dilated", "one channel"],
)
def test_the_result_may_be_changed_in_place(layer):
    model = nn.Sequential(layer, nn.ReLU(inplace=True))
    flashdwc.convert(model)
    x = torch.randn(1, layer.in_channels, 16, 16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


def test_a_line_made_without_gradients_may_be_changed_in_place():
    scale = torch.ones(1, requires_grad=True)
    with torch.no_grad():
        y = depthwise_conv1d(torch.randn(1, 8, 16), torch.randn(8, 1, 3))
    y.mul_(scale).sum().backward()
    assert scale.grad is not None


def test_autocast_around_a_backward_pass_leaves_float32_gradients_alone():
    x, w = torch.randn(2, 8, 16, 16), torch.randn(8, 1, 3, 3, requires_grad=True)
    y = depthwise_conv2d(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        (inside,) = torch.autograd.grad(y.square().sum(), w, retain_graph=True)
    (outside,) = torch.autograd.grad(y.square().sum(), w)
    assert torch.equal(inside, outside)


def test_autocast_of_the_transposed_convolution():
    with torch.autocast("cpu", torch.bfloat16):
        assert depthwise_conv_transpose2d(X, W).dtype == torch.bfloat16


def test_vmap_over_an_empty_batch():
    mapped = torch.func.vmap(lambda x: depthwise_conv2d(x, W))
    assert mapped(torch.randn(0, 1, 3, 6, 6)).shape == (0, 1, 3, 4, 4)


def test_a_refused_bool_spoils_no_later_call():
    with pytest.raises(ValueError, match="stride"):
        depthwise_conv2d(X, W, stride=(True, True))
    assert depthwise_conv2d(X, W, stride=(1, 1)).shape == (1, 3, 4, 4)


def test_a_single_infinite_tap_on_the_padding_takes_no_part():
    y = depthwise_conv2d(torch.ones(2, 8, 6, 7), torch.full((8, 1, 1, 1), torch.inf), padding=1)
    assert (y[:, :, 0] == 0).all()
    assert (y[:, :, 1:-1, 1:-1] == torch.inf).all()


def test_fx_traces_a_converted_model():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.ReLU())
    flashdwc.convert(model)
    assert torch.equal(torch.fx.symbolic_trace(model)(X), model(X))


@pytest.mark.parametrize(
    "layer", [flashdwc.nn.DepthwiseConv1d(3, 6, 3, groups=3), lambda x: depthwise_conv1d(x, W[:, :, 0], causal=True)]
)
def test_tracing_a_line(layer):
    x = torch.randn(2, 3, 9)
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(x + 1), layer(x + 1))


def test_tracing_a_transposed_convolution():
    traced = torch.jit.trace(lambda x: depthwise_conv_transpose2d(x, W, None, 2, 1), X)
    torch.testing.assert_close(traced(-X), F.conv_transpose2d(-X, W, None, 2, 1, groups=3))


def test_batched_tangents_of_the_older_kind():
    jacobian = torch.autograd.functional.jacobian
    ours_, theirs = (
        jacobian(f, X, vectorize=True, strategy="forward-mode")
        for f in (lambda x: depthwise_conv2d(x, W), lambda x: F.conv2d(x, W, groups=3))
    )
    torch.testing.assert_close(ours_, theirs)


def test_the_backward_node_bears_the_operator_s_name():
    assert "depthwise_conv" in ours(W.clone().requires_grad_()).grad_fn.name()


@pytest.mark.parametrize("layout", [Tensor.contiguous, channels_last])
def test_a_convolution_that_is_all_pytorch_s_trains_in_its_graph(layout):
    """Small filters on the CPU: no Python in the graph, which costs such a layer a third of its time."""
    x, w, b = layout(torch.randn(2, 16, 9, 9)), torch.randn(16, 1, 3, 3), torch.randn(16)
    steps = (1, 1), (1, 1, 1, 1), (1, 1)
    frozen = depthwise_conv2d(x.requires_grad_(), w, b, padding=1)
    assert "depthwise_conv" in frozen.grad_fn.name()  # PyTorch's node would keep the input for nothing
    w.requires_grad_(), b.requires_grad_()
    for _ in range(3):  # planned, remembered, recalled
        y, expected = depthwise_conv2d(x, w, b, padding=1), F.conv2d(x, w, b, padding=1, groups=16)
        theirs = choose_for_autograd(x, w, *steps) is not None
        assert ("depthwise_conv" in y.grad_fn.name()) is not theirs
        assert y.stride() == expected.stride()
        g = layout(torch.randn(y.shape))
        ours_, theirs_ = (torch.autograd.grad(z, (x, w, b), g, create_graph=True) for z in (y, expected))
        torch.testing.assert_close((y, *ours_), (expected, *theirs_))
        assert ours_[1].stride() == w.stride()
        second = [torch.autograd.grad(sum(d.square().sum() for d in first), (x, w)) for first in (ours_, theirs_)]
        torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            assert not depthwise_conv2d(x, w, b, padding=1).requires_grad


@pytest.mark.parametrize("leaf", [True, False])
def test_only_the_gradients_that_are_asked_for_are_computed(leaf, monkeypatch):
    """Both factors require a gradient, ``torch.autograd.grad`` wants one: a saliency map, a gradient penalty."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    inputs = (x, w) if leaf else (x * 1, w * 1)

    def forbidden(*_):
        raise AssertionError("computed for nothing")

    for i, other in enumerate(("weight_grad", "input_grad")):
        expected = torch.autograd.grad(F.conv2d(*inputs, groups=3).square().sum(), inputs[i], retain_graph=True)
        y = depthwise_conv2d(*inputs)
        with monkeypatch.context() as patch:
            patch.setattr(depthwise_operators, other, forbidden)
            found = torch.autograd.grad(y.square().sum(), inputs[i], retain_graph=True)
        torch.testing.assert_close(found, expected)
    bias = torch.zeros(3, requires_grad=True)
    y = depthwise_conv2d(*inputs, bias)
    with monkeypatch.context() as patch:
        for operator in ("weight_grad", "input_grad"):
            patch.setattr(depthwise_operators, operator, forbidden)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), bias)[0], torch.full((3,), 16.0))
    both = torch.autograd.grad(depthwise_conv2d(*inputs).square().sum(), inputs, create_graph=True)
    penalty = both[0].square().sum()
    torch.testing.assert_close(
        torch.autograd.grad(penalty, inputs, retain_graph=True),
        torch.autograd.grad(
            torch.autograd.grad(F.conv2d(*inputs, groups=3).square().sum(), inputs, create_graph=True)[0]
            .square()
            .sum(),
            inputs,
        ),
        rtol=1e-4,
        atol=1e-4,
    )
