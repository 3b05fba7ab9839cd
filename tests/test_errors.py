"""Refusals: of the right type, naming argument, expected and got, and before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import flashdwc
from flashdwc import depthwise_conv1d, depthwise_conv2d, depthwise_conv3d, depthwise_conv_transpose2d
from flashdwc.core import config
from flashdwc.ops.depthwise import forward, input_grad, weight_grad

X, W = torch.randn(1, 4, 5, 6), torch.randn(4, 1, 3, 3)
GEOMETRY = ((1, 1), (1, 1, 1, 1), (1, 1), "auto", "auto")

# name of the case: call, exception, what the message must hold
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], list[str]]] = {
    "input is no tensor": (lambda: depthwise_conv2d([[1.0]], W), TypeError, ["input", "Tensor", "list"]),
    "weight is no tensor": (lambda: depthwise_conv2d(X, 3.0), TypeError, ["weight", "Tensor", "float"]),
    "bias is no tensor": (lambda: depthwise_conv2d(X, W, 1.0), TypeError, ["bias", "Tensor", "float"]),
    "input of rank 2": (lambda: depthwise_conv2d(X[0, 0], W), ValueError, ["input", "3 or 4", "(5, 6)"]),
    "input of rank 5": (lambda: depthwise_conv2d(X[None], W), ValueError, ["input", "3 or 4", "(1, 1, 4, 5, 6)"]),
    "weight of rank 3": (lambda: depthwise_conv2d(X, W[0]), ValueError, ["weight", "4 dimensions", "(1, 3, 3)"]),
    "rank in one dimension": (lambda: depthwise_conv1d(X, W[0]), ValueError, ["input", "2 or 3", "(1, 4, 5, 6)"]),
    "rank in three dimensions": (lambda: depthwise_conv3d(X, W), ValueError, ["weight", "5 dimensions"]),
    "channels": (
        lambda: depthwise_conv2d(X, torch.randn(6, 1, 3, 3)),
        ValueError,
        ["weight", "4 * multiplier", "(6, 1"],
    ),
    "a dense weight": (lambda: depthwise_conv2d(X, torch.randn(4, 2, 3, 3)), ValueError, ["weight", "(4, 2, 3, 3)"]),
    "no channels": (lambda: depthwise_conv2d(X[:, :0], W[:0]), ValueError, ["weight", "0 channels"]),
    "padding beyond 64 bits": (lambda: depthwise_conv2d(X, W, padding=2**62), ValueError, ["padding", "2^62"]),
    "no taps": (lambda: depthwise_conv2d(X, W[:, :, :0]), ValueError, ["kernel size", "positive", "(0, 3)"]),
    "size of the bias": (lambda: depthwise_conv2d(X, W, torch.randn(3)), ValueError, ["bias", "(4,)", "(3,)"]),
    "rank of the bias": (lambda: depthwise_conv2d(X, W, torch.randn(4, 1)), ValueError, ["bias", "(4,)", "(4, 1)"]),
    "half input": (lambda: depthwise_conv2d(X.half(), W), TypeError, ["weight", "float16", "float32"]),
    "double bias": (lambda: depthwise_conv2d(X, W, torch.randn(4).double()), TypeError, ["bias", "float32", "float64"]),
    "a sparse bias": (
        lambda: depthwise_conv2d(X, W, torch.ones(4).to_sparse()),
        TypeError,
        ["bias", "dense", "sparse"],
    ),
    "a nested input": (
        lambda: depthwise_conv2d(torch.nested.nested_tensor([X[0], X[0, :, :4]]), W),
        TypeError,
        ["input", "dense", "nested"],
    ),
    "an array for numbers": (
        lambda: depthwise_conv2d(X, W, stride=np.array([1, 1])),
        TypeError,
        ["stride", "an int or 2"],
    ),
    "an array of padding": (
        lambda: depthwise_conv1d(X[0], W[0], padding=np.array([0, 0]), causal=True),
        TypeError,
        ["padding", "an int or 1"],
    ),
    "impl is a list": (lambda: depthwise_conv2d(X, W, impl=["cuda"]), ValueError, ["impl", "auto", "['cuda']"]),
    "cropping": (lambda: depthwise_conv2d(X, W, padding=-1, padding_mode="reflect"), ValueError, ["padding", "(-1,"]),
    "integers": (lambda: depthwise_conv2d(X.int(), W.int()), TypeError, ["input", "float16", "int32"]),
    "complex": (lambda: depthwise_conv2d(X.cfloat(), W.cfloat()), TypeError, ["input", "float16", "complex64"]),
    "other device": (lambda: depthwise_conv2d(X, W.to("meta")), ValueError, ["weight", "cpu", "meta"]),
    "sparse input": (lambda: depthwise_conv2d(X.to_sparse(), W), TypeError, ["input", "dense", "sparse_coo"]),
    "bias of a transposed convolution": (
        lambda: depthwise_conv_transpose2d(X, W, torch.randn(4).double()),
        TypeError,
        ["bias", "float32", "float64"],
    ),
    "bias elsewhere": (
        lambda: depthwise_conv_transpose2d(X, W, torch.randn(4, device="meta")),
        ValueError,
        ["bias", "cpu", "meta"],
    ),
    "integers, transposed": (lambda: depthwise_conv_transpose2d(X.int(), W.int()), TypeError, ["input", "int32"]),
    "negative stride, transposed": (lambda: depthwise_conv_transpose2d(X, W, None, -1), ValueError, ["stride", "-1"]),
    "fractional side": (lambda: depthwise_conv2d(X, W, padding=(1.5, 1, 1, 1)), ValueError, ["padding", "int", "1.5"]),
    "replicated emptiness": (
        lambda: depthwise_conv2d(X[:, :, :0], W, padding=2, padding_mode="replicate"),
        ValueError,
        ["padding", "replicate", "size 0"],
    ),
    "stride 0": (lambda: depthwise_conv2d(X, W, stride=0), ValueError, ["stride", "positive", "(0, 0)"]),
    "negative dilation": (lambda: depthwise_conv2d(X, W, dilation=(1, -1)), ValueError, ["dilation", "(1, -1)"]),
    "negative padding": (lambda: depthwise_conv2d(X, W, padding=-1), ValueError, ["padding", "non-negative", "-1"]),
    "three strides": (lambda: depthwise_conv2d(X, W, stride=(1, 1, 1)), ValueError, ["stride", "2", "(1, 1, 1)"]),
    "three paddings": (lambda: depthwise_conv2d(X, W, padding=(1, 1, 1)), ValueError, ["padding", "(1, 1, 1)"]),
    "fractional stride": (lambda: depthwise_conv2d(X, W, stride=(1.5, 1)), ValueError, ["stride", "int", "1.5"]),
    "unknown padding": (lambda: depthwise_conv2d(X, W, padding="full"), ValueError, ["padding", "'same'", "'full'"]),
    "same and a stride": (
        lambda: depthwise_conv2d(X, W, None, 2, "same"),
        ValueError,
        ["padding", "stride 1", "(2, 2)"],
    ),
    "padding mode": (
        lambda: depthwise_conv2d(X, W, padding_mode="wrap"),
        ValueError,
        ["padding_mode", "reflect", "wrap"],
    ),
    "reflect too far": (
        lambda: depthwise_conv2d(X, W, padding=(5, 1), padding_mode="reflect"),
        ValueError,
        ["padding", "at most 4", "size 5", "(5, 5)"],
    ),
    "circular too far": (
        lambda: depthwise_conv2d(X, W, padding=(1, 7), padding_mode="circular"),
        ValueError,
        ["padding", "at most 6", "size 6", "(7, 7)"],
    ),
    "kernel too large": (lambda: depthwise_conv2d(X, W, dilation=(1, 3)), ValueError, ["weight", "extent 7", "size 6"]),
    "precision": (lambda: depthwise_conv2d(X, W, precision="fast"), ValueError, ["precision", "'ieee'", "'fast'"]),
    "impl": (lambda: depthwise_conv2d(X, W, impl="triton"), ValueError, ["impl", "cuda", "'triton'"]),
    "causal and padding": (
        lambda: depthwise_conv1d(X[0], W[0], padding=1, causal=True),
        ValueError,
        ["padding", "causal"],
    ),
    "causal and no tensor": (
        lambda: depthwise_conv1d(3, W[:, :, 0], causal=True),
        TypeError,
        ["input", "Tensor", "int"],
    ),
    "causal and rank": (lambda: depthwise_conv1d(X, W[0], causal=True), ValueError, ["input", "[N, C, L]"]),
    "transposed: rank": (lambda: depthwise_conv_transpose2d(X, W[0]), ValueError, ["weight", "(1, 3, 3)"]),
    "transposed: channels": (lambda: depthwise_conv_transpose2d(X, W[:3]), ValueError, ["weight", "[4, m", "(3, 1"]),
    "transposed: bias": (lambda: depthwise_conv_transpose2d(X, W, W[0, 0]), ValueError, ["bias", "(4,)", "(3, 3)"]),
    "transposed: extra": (
        lambda: depthwise_conv_transpose2d(X, W, output_padding=1),
        ValueError,
        ["output_padding", "max(stride, dilation) - 1", "(1, 1)"],
    ),
    "transposed: nothing left": (lambda: depthwise_conv_transpose2d(X, W, padding=4), ValueError, ["input", "(-1, 0)"]),
    "transposed: stride": (lambda: depthwise_conv_transpose2d(X, W, stride=0), ValueError, ["stride", "positive"]),
    "transposed: dtype": (lambda: depthwise_conv_transpose2d(X, W.double()), TypeError, ["weight", "float64"]),
    "transposed: no tensor": (lambda: depthwise_conv_transpose2d(3, W), TypeError, ["input", "Tensor", "int"]),
    "gradient of another size": (
        lambda: input_grad(X, W, (1, 4, 6, 6), *GEOMETRY),
        ValueError,
        ["grad_output", "(1, 4, 6, 6)", "(1, 4, 5, 6)"],
    ),
    "gradient and input disagree": (
        lambda: weight_grad(X[..., 1:], X, (4, 1, 3, 3), (9, 9, 3, 1), *GEOMETRY),
        ValueError,
        ["grad_output", "(1, 4, 5, 6)", "(1, 4, 5, 5)"],
    ),
}


def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records every plan that is made."""
    made: list[str] = []
    for operator in (forward, input_grad, weight_grad):
        for backend in operator.backends:
            plan = backend.plan
            monkeypatch.setitem(
                backend.__dict__, "plan", lambda *args, p=plan, n=backend.name: (made.append(n), p(*args))[1]
            )
    return made


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(name, monkeypatch):
    call, exception, words = REFUSED[name]
    made = ran(monkeypatch)
    with pytest.raises(exception) as error:
        call()
    assert type(error.value) is exception
    assert not [word for word in words if word not in str(error.value)], str(error.value)
    assert not made


def test_the_recorder_of_plans_records(monkeypatch):
    made = ran(monkeypatch)
    forward._plans.clear(), forward._calls.clear()
    depthwise_conv2d(X, W)
    assert made == ["cpu"]


@pytest.mark.parametrize(
    ("tensors", "arguments", "message"),
    [
        ((X, torch.randn(6, 1, 3, 3)), {}, "weight: expected shape"),
        ((X, W, torch.randn(3)), {}, "bias: expected shape"),
        ((X.half(), W), {}, "weight: expected the dtype"),
        ((X, W), {"dilation": 3}, "weight: expected a kernel that fits"),
        ((X, W), {"stride": -1}, "stride"),
        ((X, W), {"padding": (1, -1)}, "padding: expected non-negative"),
    ],
)
def test_traces_and_explain_refuse_what_the_call_refuses(tensors, arguments, message):
    on_meta = [t.to("meta") for t in tensors]
    for call in (
        lambda: depthwise_conv2d(*tensors, **arguments),
        lambda: depthwise_conv2d(*on_meta, **arguments),
        lambda: flashdwc.explain(depthwise_conv2d, *tensors, **arguments),
        lambda: flashdwc.explain(depthwise_conv2d, *on_meta, **arguments),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_cuda_kernels_on_the_cpu_are_refused_with_the_reason():
    for call in (
        lambda: depthwise_conv2d(X, W, impl="cuda"),
        lambda: depthwise_conv_transpose2d(X, W, impl="cuda"),
        lambda: depthwise_conv1d(X[:, :, 0], W[:, :, 0], impl="cuda"),
        lambda: depthwise_conv2d(X.clone().requires_grad_(), W, impl="cuda"),
    ):
        with pytest.raises(flashdwc.UnsupportedError, match=r"impl='cuda' does not cover this call: .* cpu"):
            call()


def test_a_nested_input_after_a_call_that_is_remembered():
    """The guards of a remembered call asked for its strides, which ended the process."""
    depthwise_conv2d(X, W)
    with pytest.raises(TypeError, match="input: expected a dense tensor, got a nested one"):
        depthwise_conv2d(torch.nested.nested_tensor([X[0], X[0, :, :4]]), W)


def test_explain_does_not_print_a_model():
    model = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3, groups=4) for _ in range(50)))
    with pytest.raises(TypeError, match="Sequential .*convert") as error:
        flashdwc.explain(model, X)
    assert len(str(error.value)) < 300


def test_a_forced_implementation_never_falls_back(monkeypatch):
    monkeypatch.setattr("flashdwc.core.backend.config", config.Config(config.config.cache_dir, "cuda", False))
    forward._plans.clear(), forward._calls.clear()
    try:
        with pytest.raises(flashdwc.UnsupportedError, match="cuda"):
            depthwise_conv2d(X, W)
        assert depthwise_conv2d(X, W, impl="torch").shape == X[..., 2:, 2:].shape
    finally:
        forward._plans.clear(), forward._calls.clear()


def test_a_refusal_leaves_no_trace():
    for _ in range(2):
        with pytest.raises(ValueError, match="bias"):
            depthwise_conv2d(X, W, torch.randn(3))
    assert depthwise_conv2d(X, W, torch.randn(4)).isfinite().all()


@pytest.mark.gpu
def test_refused_on_cuda():
    x, w = X.cuda(), W.cuda()
    for call, words in (
        (lambda: depthwise_conv2d(x, W), ["weight", "cuda:0", "cpu"]),
        (lambda: depthwise_conv2d(X, w), ["weight", "cuda:0", "cpu"]),
        (lambda: depthwise_conv2d(x, w, torch.randn(4)), ["bias", "cuda:0", "cpu"]),
    ):
        with pytest.raises(ValueError, match="device") as error:
            call()
        assert all(word in str(error.value) for word in words)
    for call, reason in (
        (lambda: depthwise_conv2d(x.double(), w.double(), impl="cuda"), "float64"),
        (lambda: depthwise_conv3d(x[None].half(), w[:, None].half(), impl="cuda"), "two-dimensional"),
        (lambda: depthwise_conv2d(x, w, impl="cpu"), "cuda:0"),
    ):
        with pytest.raises(flashdwc.UnsupportedError, match=reason):
            call()
    assert torch.zeros(1, device="cuda").add_(1).item() == 1  # no error left behind
