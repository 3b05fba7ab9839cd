"""The depthwise layers behave as the PyTorch layers that they replace."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashdwc.nn
from flashdwc.nn import (
    DepthwiseConv1d,
    DepthwiseConv2d,
    DepthWiseConv2dImplicitGEMM,
    DepthwiseConv2dSame,
    DepthwiseConv3d,
)

PAIRS = [(nn.Conv1d, DepthwiseConv1d), (nn.Conv2d, DepthwiseConv2d), (nn.Conv3d, DepthwiseConv3d)]
ATTRIBUTES = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "transposed", "output_padding"),
    *("groups", "padding_mode", "_reversed_padding_repeated_twice"),
)


def twins(cls: type, ours: type, *args, **kwargs) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    theirs = cls(*args, **kwargs)
    torch.manual_seed(0)
    return theirs, ours(*args, **kwargs)


def rank(cls: type) -> int:
    return {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[cls]


def definition(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """2-D, stride 1, no padding, written out tap by tap in float64."""
    x, weight = x.double().repeat_interleave(weight.shape[0] // x.shape[1], 1), weight.double()
    height, width = (x.shape[i + 2] - weight.shape[i + 2] + 1 for i in range(2))
    y = bias.double().reshape(-1, 1, 1).expand(x.shape[0], -1, height, width).clone()
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            y += x[:, :, i : i + height, j : j + width] * weight[:, 0, i, j].reshape(-1, 1, 1)
    return y


@pytest.mark.parametrize(("cls", "ours"), PAIRS)
def test_constructor_is_pytorchs(cls, ours):
    theirs = [(p.name, p.default) for p in inspect.signature(cls).parameters.values()]
    assert [(p.name, p.default) for p in inspect.signature(ours).parameters.values()] == theirs


@pytest.mark.parametrize(("cls", "ours"), PAIRS)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 7, "padding": 3},
        {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
        {"kernel_size": 4, "padding": "same", "padding_mode": "reflect"},
        {"kernel_size": 3, "padding": "valid", "dilation": 2, "dtype": torch.float64},
    ],
)
def test_attributes_repr_initial_values_and_state_are_pytorchs(cls, ours, options):
    """A layer without its padding attribute breaks re-parametrisation: https://github.com/DingXiaoH/RepLKNet-pytorch/issues/48"""
    a, b = twins(cls, ours, 4, 8, groups=4, **options)
    assert {name: getattr(a, name) for name in ATTRIBUTES} == {name: getattr(b, name) for name in ATTRIBUTES}
    assert repr(b) == repr(a).replace(cls.__name__, ours.__name__, 1)
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(value, b.state_dict()[key]) for key, value in a.state_dict().items())
    x = torch.randn(2, 4, *[9] * rank(cls), dtype=options.get("dtype"))
    torch.testing.assert_close(b(x), a(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": (7, 7), "padding": (3, 3), "stride": (1, 1), "dilation": (1, 1)},
        {"kernel_size": [3, 5], "padding": [1, 2]},
        {"kernel_size": [3, 5], "padding": "same", "bias": False},
    ],
)
def test_tuples_and_lists_mean_the_same_as_numbers(options):
    """https://github.com/AILab-CVC/UniRepLKNet/issues/8"""
    a, b = twins(nn.Conv2d, DepthwiseConv2d, 4, 8, groups=4, **options)
    assert {name: getattr(a, name) for name in ATTRIBUTES} == {name: getattr(b, name) for name in ATTRIBUTES}
    x = torch.randn(1, 4, 9, 9)
    torch.testing.assert_close(b(x), a(x), rtol=1e-5, atol=1e-5)


def test_positional_arguments_keep_their_order():
    args = (4, 8, 3, 2, 1, 1, 4, False, "circular", "meta", torch.float16)
    a, b = nn.Conv2d(*args), DepthwiseConv2d(*args)
    assert a.extra_repr() == b.extra_repr()
    assert (b.weight.device.type, b.weight.dtype, b.bias) == ("meta", torch.float16, None)


@pytest.mark.parametrize(("cls", "ours"), PAIRS)
def test_gradients_are_pytorchs(cls, ours):
    a, b = twins(cls, ours, 3, 6, 3, stride=2, padding=1, groups=3, dtype=torch.float64)
    x = torch.randn(2, 3, *[7] * rank(cls), dtype=torch.float64)
    grads = []
    for layer in (a, b):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        grads.append(torch.autograd.grad(y.square().sum(), [leaf, layer.weight, layer.bias]))
    for theirs, mine in zip(*grads):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("ours", [ours for _, ours in PAIRS])
@pytest.mark.parametrize(("channels", "outputs", "groups"), [(8, 8, 1), (8, 8, 4), (8, 12, 8), (8, 8, 3), (0, 0, 0)])
def test_layers_that_are_not_depthwise_are_refused(ours, channels, outputs, groups):
    wrong, expected, got = ("groups", channels, groups) if groups != channels else ("out_channels", channels, outputs)
    with pytest.raises(ValueError, match=rf"^{wrong}: .*\({expected}\), got {got}$"):
        ours(channels, outputs, 3, groups=groups)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("padding", [(0, 1), (2, 0), (1, 3)])
def test_padding_mode_pads_the_right_axis(mode, padding):
    """https://github.com/pytorch/pytorch/issues/37844"""
    layer = DepthwiseConv2d(6, 6, 3, padding=padding, padding_mode=mode, groups=6)
    x = torch.randn(1, 6, 20, 10)
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]), mode=mode)
    expected = definition(padded, layer.weight.detach(), layer.bias.detach())
    assert expected.shape[2:] == (18 + 2 * padding[0], 8 + 2 * padding[1])
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular", "replicate"])
def test_input_without_batch(mode):
    """https://github.com/pytorch/pytorch/issues/152152"""
    layer = DepthwiseConv2d(4, 8, 3, padding=2, padding_mode=mode, groups=4)
    x = torch.randn(4, 9, 7)
    assert layer(x).shape == (8, 11, 9)
    torch.testing.assert_close(layer(x), layer(x[None])[0])


@pytest.mark.parametrize("shape", [(4, 7), (1, 1, 4, 9, 7), (1, 5, 9, 7)])
def test_wrong_rank_or_channels_name_the_shape(shape):
    with pytest.raises(ValueError, match=str(tuple(shape)).replace("(", r"[(\[]").replace(")", r"[)\]]") + "|5"):
        DepthwiseConv2d(4, 8, 3, padding=2, groups=4)(torch.randn(shape))


def test_reflection_beyond_the_input_is_refused():
    layer = DepthwiseConv2d(4, 4, 3, padding=(1, 3), padding_mode="reflect", groups=4)
    with pytest.raises(ValueError, match=r"padding: .*3"):
        layer(torch.randn(4, 9, 3))


@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("input_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel", [1, 5])
def test_weight_gradient_has_the_strides_of_the_weight(input_format, weight_format, kernel):
    """Else DDP copies every gradient and warns: https://github.com/BGU-CS-VIL/WTConv/issues/36"""
    layer = DepthwiseConv2d(16, 16, kernel, padding=kernel // 2, groups=16).to(memory_format=weight_format)
    layer(torch.randn(2, 16, 9, 9).to(memory_format=input_format)).sum().backward()
    assert layer.weight.grad.stride() == layer.weight.stride()


def test_parametrised_weight_is_used():
    layers = twins(nn.Conv2d, DepthwiseConv2d, 4, 8, 3, groups=4)
    for layer in layers:
        nn.utils.parametrizations.weight_norm(layer, "weight")
        layer.parametrizations.weight.original0.data.mul_(3)
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(layers[1](x), layers[0](x), rtol=1e-5, atol=1e-5)


def test_subclass_may_compute_its_own_weight():
    class Standardised(DepthwiseConv2d):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)

    layer = Standardised(4, 8, 3, groups=4)
    x = torch.randn(2, 4, 8, 8)
    centred = layer.weight - layer.weight.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(layer(x), F.conv2d(x, centred, layer.bias, groups=4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ours", [ours for _, ours in PAIRS])
def test_copy_and_pickle(ours):
    layer = ours(4, 8, 3, groups=4)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is ours and repr(twin) == repr(layer) and torch.equal(twin.weight, layer.weight)


def test_export_with_dynamic_batch_and_saved_trace():
    """https://github.com/pytorch/pytorch/issues/68880: padding="same" could not be exported, a Python function not saved."""
    model = nn.Sequential(DepthwiseConv2d(3, 6, 4, padding="same", groups=3), nn.ReLU()).eval()
    x, other = torch.randn(2, 3, 8, 9), torch.randn(5, 3, 8, 9)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=64)},))
    torch.testing.assert_close(exported.module()(other), model(other), rtol=1e-4, atol=1e-5)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.trace(model, x), buffer)
        buffer.seek(0)
        torch.testing.assert_close(torch.jit.load(buffer)(other), model(other), rtol=1e-4, atol=1e-5)


def test_onnx_export_gives_a_plain_convolution():
    """https://github.com/Dao-AILab/flash-attention/issues/431: "Couldn't export Python operator"."""
    pytest.importorskip("onnxscript")
    layer = DepthwiseConv2d(3, 6, 4, padding="same", groups=3).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(layer, (torch.randn(2, 3, 8, 9),), dynamo=True, verbose=False)
    assert [node.op_type for node in program.model.graph] == ["Conv"]


def test_same_layer_exports_with_dynamic_sizes():
    layer = DepthwiseConv2dSame(3, 6, 5, stride=2, groups=3).eval()
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(layer, (torch.randn(2, 3, 17, 24),), dynamic_shapes=({0: auto, 2: auto, 3: auto},))
    for size in ((1, 3, 31, 30), (3, 3, 8, 9)):
        x = torch.randn(size)
        torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-4, atol=1e-5)


def test_explain_runs_nothing():
    layer = DepthwiseConv2d(4, 8, 3, padding="same", groups=4, device="meta")
    explanation = layer.explain(torch.empty(2, 4, 9, 9, device="meta"))
    assert explanation.chosen in dict(explanation.backends)


@pytest.mark.parametrize(
    ("kernel", "size", "padding"), [(7, (7, 7), (3, 3)), ((51, 5), (51, 5), (25, 2)), ([3, 9], (3, 9), (1, 4))]
)
def test_implicit_gemm_layer_has_real_attributes(kernel, size, padding):
    """https://github.com/DingXiaoH/RepLKNet-pytorch/pull/59"""
    layer = DepthWiseConv2dImplicitGEMM(6, kernel)
    assert isinstance(layer, nn.Conv2d)
    assert (layer.in_channels, layer.out_channels, layer.groups, layer.bias) == (6, 6, 6, None)
    assert (layer.kernel_size, layer.padding, layer.stride, layer.dilation) == (size, padding, (1, 1), (1, 1))
    assert list(layer.state_dict()) == ["weight"]
    assert DepthWiseConv2dImplicitGEMM(6, kernel, bias=True).bias.shape == (6,)
    x = torch.randn(1, 6, 12, 11)
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, None, 1, padding, groups=6), rtol=1e-5, atol=1e-5)


def test_implicit_gemm_layer_serves_code_that_imports_the_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, "depthwise_conv2d_implicit_gemm", flashdwc.nn)
    from depthwise_conv2d_implicit_gemm import DepthWiseConv2dImplicitGEMM as Imported

    assert Imported is DepthWiseConv2dImplicitGEMM
    with pytest.raises(ValueError, match="kernel: expected an int or a pair"):
        Imported(6, (3, 3, 3))


@pytest.mark.parametrize("kernel", [3, 4, (1, 5)])
@pytest.mark.parametrize("stride", [1, 2, (3, 1)])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("size", [(8, 8), (7, 10), (1, 5)])
def test_same_layer_is_timms(kernel, stride, dilation, size):
    timm = pytest.importorskip("timm")
    theirs, mine = twins(timm.layers.Conv2dSame, DepthwiseConv2dSame, 4, 8, kernel, stride, dilation=dilation, groups=4)
    assert repr(mine) == repr(theirs).replace("Conv2dSame", "DepthwiseConv2dSame")
    x = torch.randn(2, 4, *size)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert mine(x).shape[2:] == tuple(-(-n // s) for n, s in zip(size, mine.stride))
