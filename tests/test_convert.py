"""Existing models run on flashdwc and compute what they computed before."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from flashdwc import ops
from flashdwc.convert import convert, patch, restore
from flashdwc.nn import DepthwiseConv1d, DepthwiseConv2d, DepthwiseConv2dSame, DepthwiseConv3d

TIMM = (
    *("convnext_atto", "convmixer", "mobilenetv2_050", "mobilenetv3_small_050", "efficientnet_lite0"),
    *("tf_efficientnet_lite0", "inception_next_atto", "fastvit_t8", "edgenext_xx_small", "repvit_m0_9", "starnet_s1"),
)
TORCHVISION = ("mobilenet_v3_small", "convnext_tiny")


class Activated(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def small_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 4, 3, groups=4, padding=1, padding_mode="circular"),
        nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, stride=2, groups=4, bias=False), nn.Dropout(0.5)),
        nn.Conv2d(8, 8, 3, groups=2),
    )


def random_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.running_mean, std=0.1)
    return model.eval()


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@torch.no_grad()
def output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert expected.isfinite().all() and expected.std() > 0
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def real_model(name: str) -> nn.Module:
    if name in TORCHVISION:
        return getattr(pytest.importorskip("torchvision").models, name)(weights=None, num_classes=10)
    timm = pytest.importorskip("timm")
    if name == "convmixer":  # the registered ones are large
        return timm.models.convmixer.ConvMixer(dim=32, depth=2, kernel_size=9, patch_size=7, num_classes=10)
    return timm.create_model(name, pretrained=False, num_classes=10)


@pytest.mark.parametrize("name", [*TIMM, *TORCHVISION])
def test_real_models(name):
    torch.manual_seed(0)
    model = real_model(name)
    random_statistics(model)
    x = torch.randn(2, 3, 64, 64)
    expected, before, keys = output(model, x), classes(model), list(model.state_dict())
    report = convert(model)
    depthwise = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1]
    assert len(report.converted) == len(depthwise) > 0 and not report.left_alone
    assert list(model.state_dict()) == keys
    assert_near(output(model, x), expected)
    assert_near(output(copy.deepcopy(model), x), expected)
    assert restore(model) == len(depthwise)
    assert classes(model) == before
    with patch():
        assert_near(output(model, x), expected)


def test_timm_same_padding_becomes_ours():
    timm = pytest.importorskip("timm")
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    strided = [name for name, layer in model.named_modules() if type(layer) is timm.layers.Conv2dSame]
    convert(model)
    kinds = {name: type(layer) for name, layer in model.named_modules()}
    assert [name for name, kind in kinds.items() if kind is DepthwiseConv2dSame] == strided[1:]
    assert kinds[strided[0]] is timm.layers.Conv2dSame  # the stem is an ordinary convolution


def test_state_stays_the_same_objects():
    """Surgery must not lose weights or rename keys: https://github.com/mosaicml/composer/issues/297"""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Sequential(nn.Conv2d(4, 8, 3, groups=4, bias=False)))
    model.double().eval()
    model[0].weight.requires_grad_(False)
    model[0].register_buffer("mask", torch.ones(1))
    hits: list[int] = []
    model[0].register_forward_hook(lambda *_: hits.append(1))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = copy.deepcopy(model.state_dict())
    optimiser = torch.optim.SGD([p for p in parameters.values() if p.requires_grad], 0.1)
    first = model[0]

    assert len(convert(model).converted) == 2
    assert model[0] is first and type(first) is DepthwiseConv2d
    after = dict(model.named_parameters())
    assert list(after) == list(parameters) and all(after[name] is parameters[name] for name in after)
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert not model.training and not first.weight.requires_grad and first.weight.dtype is torch.float64
    model.load_state_dict(state, strict=True)
    model(torch.randn(1, 4, 9, 9, dtype=torch.float64)).sum().backward()
    optimiser.step()
    assert hits and not torch.equal(after["1.0.weight"], state["1.0.weight"])
    fresh = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Sequential(nn.Conv2d(4, 8, 3, groups=4, bias=False)))
    fresh[0].register_buffer("mask", torch.zeros(1))
    fresh.load_state_dict(model.state_dict(), strict=True)


def test_subclasses_keep_their_behaviour_and_are_reported():
    """A fused activation vanished without a word: https://github.com/pytorch/pytorch/issues/187298"""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), Activated(4, 4, 3, groups=4), Standardised(4, 8, 3, groups=4))
    x = torch.randn(2, 4, 12, 12)
    expected = output(model, x)
    report = convert(model)
    assert_near(output(model, x), expected)
    assert classes(model)[1:] == [DepthwiseConv2d, Activated, Standardised]
    assert [(layer.name, layer.converted) for layer in report] == [("0", True), ("1", False), ("2", False)]
    assert [layer.type for layer in report.left_alone] == ["Activated", "Standardised"]
    assert all("subclass" in layer.reason for layer in report.left_alone)
    with patch():
        assert_near(output(model, x), expected)


def test_layers_that_cannot_be_converted_say_why():
    parametrised = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, groups=4))
    overridden = nn.Conv2d(4, 4, 3, groups=4)
    overridden._conv_forward = lambda x, weight, bias: x
    complex_valued = nn.Conv2d(4, 4, 3, groups=4, dtype=torch.complex64)
    quantised = torch.ao.nn.qat.Conv2d(4, 4, 3, groups=4, qconfig=torch.ao.quantization.get_default_qat_qconfig())
    wrapped = nn.Conv2d(4, 4, 3, groups=4)
    wrapped.weight = nn.Parameter(TwoTensor(wrapped.weight.detach(), wrapped.weight.detach()))
    model = nn.ModuleList([parametrised, overridden, complex_valued, quantised, wrapped])
    before = classes(model)
    reasons = [layer.reason for layer in convert(model).left_alone]
    assert classes(model) == before
    words = ["ParametrizedConv2d", "_conv_forward", "complex64", "subclass", "TwoTensor"]
    assert all(word in reason for reason, word in zip(reasons, words, strict=True))


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Conv1d(4, 8, 3, groups=4), DepthwiseConv1d),
        (nn.Conv2d(4, 4, 3, groups=4, padding="same"), DepthwiseConv2d),
        (nn.Conv3d(4, 4, 3, groups=4, padding=1, padding_mode="replicate"), DepthwiseConv3d),
    ],
)
def test_the_model_may_be_one_layer(layer, kind):
    x = torch.randn(1, 4, *[6] * (layer.weight.dim() - 2))
    expected, before = layer(x), type(layer)
    (entry,) = convert(layer)
    assert type(layer) is kind and (entry.name, entry.converted) == ("", True)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert restore(layer) == 1 and type(layer) is before and "_class_before_convert" not in layer.__dict__


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(1, 8, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(2, 2)]
)
def test_other_layers_are_neither_touched_nor_listed(layer):
    before = type(layer)
    assert len(convert(layer)) == 0 and type(layer) is before


def test_shared_layers_count_once():
    shared = nn.Conv2d(4, 4, 3, groups=4, padding=1)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared))
    x = torch.randn(1, 4, 8, 8)
    expected = output(model, x)
    assert [layer.name for layer in convert(model, x)] == ["0"]
    assert model[0] is model[2][0]
    assert_near(output(model, x), expected)
    assert restore(model) == 1


def test_converting_twice_changes_nothing():
    model = small_model()
    convert(model)
    before = classes(model)
    again = convert(model, torch.randn(1, 3, 16, 16))
    assert classes(model) == before and not again.converted and all(layer.backend != "-" for layer in again)
    assert restore(model) == 2 and restore(model) == 0


def test_restore_leaves_layers_that_were_built_as_ours():
    model = nn.Sequential(DepthwiseConv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3, groups=4))
    assert [layer.converted for layer in convert(model)] == [False, True]
    assert restore(model) == 1
    assert classes(model)[1:] == [DepthwiseConv2d, nn.Conv2d]


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded])
def test_twins_of_a_converted_model(twin_of):
    model = small_model().eval()
    before = classes(model)
    convert(model)
    twin = twin_of(model)
    x = torch.randn(1, 3, 16, 16)
    assert classes(twin) == classes(model)
    assert_near(output(twin, x), output(model, x))
    assert restore(twin) == 2 and classes(twin) == before and classes(model) != before


def test_wrapped_in_data_parallel():
    model = nn.DataParallel(small_model().eval())
    x = torch.randn(1, 3, 16, 16)
    expected = output(model, x)
    assert [layer.name for layer in convert(model, x)] == ["module.1", "module.2.1"]
    assert_near(output(model, x), expected)


def test_parametrisation_after_conversion():
    layer = nn.Conv2d(4, 4, 3, groups=4)
    x = torch.randn(1, 4, 8, 8)
    expected = output(layer, x)
    convert(layer)
    nn.utils.parametrizations.weight_norm(layer)
    assert_near(output(layer, x), expected)
    assert restore(layer) == 0  # a class was made on top of ours
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert restore(layer) == 1
    assert_near(output(layer, x), expected)


def test_wrappers_that_call_the_convolution_with_their_own_weight():
    class LowRank(nn.Module):
        def __init__(self, conv: nn.Conv2d) -> None:
            super().__init__()
            self.conv, self.delta = conv, nn.Parameter(torch.randn_like(conv.weight))

        def forward(self, x: Tensor) -> Tensor:
            return self.conv._conv_forward(x, self.conv.weight + self.delta, self.conv.bias)

    model = LowRank(nn.Conv2d(4, 4, 3, groups=4))
    x = torch.randn(1, 4, 8, 8)
    expected = output(model, x)
    convert(model)
    assert_near(output(model, x), expected)


def test_report_with_an_example():
    model = small_model()
    model[1].eval()
    model.append(nn.ModuleDict({"unused": nn.Conv1d(8, 16, 5, groups=8, dilation=2)}))
    model[4].forward = lambda x: x
    modes = [module.training for module in model.modules()]
    statistics = model[2][0].running_mean.clone()
    report = convert(model, example_input=torch.randn(2, 3, 16, 16))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[2][0].running_mean, statistics)
    assert all(not layer._forward_pre_hooks for layer in model.modules())
    first, second, unused = report
    assert (first.name, first.type, first.channels, first.kernel_size) == ("1", "Conv2d", 4, (3, 3))
    assert (first.input_shape, second.input_shape) == ((2, 4, 16, 16), (2, 4, 16, 16))
    assert (second.stride, second.multiplier, unused.dilation, unused.multiplier) == ((2, 2), 2, (2,), 2)
    assert all(layer.backend in ("cuda", "cpu", "torch") and layer.reason for layer in (first, second))
    assert (unused.backend, unused.input_shape) == ("-", None) and "not reached" in unused.reason
    lines = str(report).splitlines()
    assert lines[0].split()[:4] == ["layer", "type", "input", "C"]
    assert "2.1" in lines[2] and "2x4x16x16" in lines[2] and first.backend in lines[1]
    assert lines[-1] == "3 of 3 depthwise layers converted"


@pytest.mark.parametrize(
    "example", [(torch.randn(1, 3, 9, 9), 2.0), [torch.randn(1, 3, 9, 9)], {"x": torch.randn(1, 3, 9, 9), "scale": 3.0}]
)
def test_examples_of_several_arguments(example):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, groups=3)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.conv(input=x) * scale

    (layer,) = convert(Scaled(), example)
    assert layer.input_shape == (1, 3, 9, 9) and layer.backend != "-"


def test_report_without_an_example():
    report = convert(small_model())
    assert {layer.backend for layer in report} == {"-"} and {layer.reason for layer in report} == {""}
    assert str(convert(nn.ReLU())).endswith("0 of 0 depthwise layers converted")


def test_failing_example_undoes_the_conversion():
    model = small_model()
    before = classes(model)
    with pytest.raises((RuntimeError, ValueError)):
        convert(model, torch.randn(1, 5, 16, 16))
    assert classes(model) == before and all(module.training for module in model.modules())
    assert all(not layer._forward_pre_hooks for layer in model.modules())


@pytest.mark.parametrize("function", [convert, restore])
def test_only_modules_are_accepted(function):
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got Tensor"):
        function(torch.ones(1))


def test_gradients_of_a_converted_model():
    model = small_model().double().eval()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    expected = gradients()
    with patch():
        inside = gradients()
    convert(model)
    for theirs, patched, mine in zip(expected, inside, gradients()):
        torch.testing.assert_close(patched, theirs)
        torch.testing.assert_close(mine, theirs)


def test_converted_model_compiles():
    model = small_model().eval()
    x = torch.randn(1, 3, 16, 16)
    expected = output(model, x)
    convert(model)
    assert_near(output(torch.compile(model, backend="aot_eager", fullgraph=True), x), expected)


class Calls:
    """Counts the calls that reach our operators, in every thread."""

    def __init__(self, monkeypatch) -> None:
        self.counts = {1: 0, 2: 0, 3: 0}
        operators = sys.modules[convert.__module__].OPERATORS
        for rank, convolution in enumerate((torch.conv1d, torch.conv2d, torch.conv3d), 1):
            monkeypatch.setitem(operators, convolution, self.counting(rank, operators[convolution]))

    def counting(self, rank, operator):
        def call(*args):
            self.counts[rank] += 1
            return operator(*args)

        return call

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


@pytest.mark.parametrize(
    ("convolution", "rank", "options"),
    [
        (F.conv1d, 1, {"padding": 1, "groups": 4}),
        (F.conv2d, 2, {"stride": (2,), "padding": [1], "groups": 4}),
        (F.conv2d, 2, {"padding": "same", "dilation": 2, "groups": 4}),
        (torch.conv3d, 3, {"bias": torch.ones(8), "groups": 4}),
    ],
)
def test_patch_routes_functions(calls, convolution, rank, options):
    x, weight = torch.randn(2, 4, *[7] * rank), torch.randn(8, 1, *[3] * rank)
    expected = convolution(x, weight, **options)
    with patch():
        torch.testing.assert_close(convolution(x, weight=weight, **options), expected, rtol=1e-4, atol=1e-4)
        positional = convolution(x[0], weight, None, 1, 0, 1, 4)
    assert calls.counts[rank] == calls.total == 2
    torch.testing.assert_close(positional, convolution(x[0], weight, None, 1, 0, 1, 4), rtol=1e-4, atol=1e-4)


def test_patch_leaves_other_calls_alone(calls):
    with patch():
        F.conv2d(torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3))
        F.conv2d(torch.randn(1, 4, 8, 8), torch.randn(4, 2, 3, 3), groups=2)
        F.conv2d(torch.randn(1, 1, 8, 8), torch.randn(8, 1, 3, 3))
        F.conv2d(torch.randn(1, 4, 8, 8, dtype=torch.cfloat), torch.randn(4, 1, 3, 3, dtype=torch.cfloat), groups=4)
        with pytest.raises(RuntimeError, match="groups=4"):
            F.conv2d(torch.randn(1, 5, 8, 8), torch.randn(4, 1, 3, 3), groups=4)
        assert torch.ones(2).sum() == 2
    F.conv2d(torch.randn(1, 4, 8, 8), torch.randn(4, 1, 3, 3), groups=4)
    assert calls.total == 0


def test_patch_respects_tensor_subclasses(calls):
    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "own" if func is torch.conv2d else super().__torch_function__(func, types, args, kwargs)

    with patch():
        assert F.conv2d(torch.randn(1, 4, 8, 8).as_subclass(Own), torch.randn(4, 1, 3, 3), groups=4) == "own"
    assert calls.total == 0


def test_patch_nests_and_ends_with_its_block(calls):
    layer, x = nn.Conv2d(4, 4, 3, groups=4), torch.randn(1, 4, 8, 8)
    expected = layer(x)
    mode = patch()
    with mode, mode, patch():
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    inside = calls.total
    with pytest.raises(KeyError), patch():
        raise KeyError
    layer(x)
    assert calls.total == inside > 0


def test_patch_decorates_functions(calls):
    layer, x = nn.Conv2d(4, 4, 3, groups=4), torch.randn(1, 4, 8, 8)

    @patch()
    def twice() -> Tensor:
        return layer(x) + layer(x)

    twice()
    twice()
    layer(x)
    assert calls.total == 4


def test_patch_holds_in_its_own_thread_only(calls):
    layer, x = nn.Conv2d(4, 4, 3, groups=4), torch.randn(1, 4, 8, 8)
    with patch():
        thread = threading.Thread(target=layer, args=(x,))
        thread.start()
        thread.join()
        assert calls.total == 0


def test_our_own_operators_work_inside_patch():
    x, weight = torch.randn(1, 4, 8, 8), torch.randn(4, 1, 3, 3)
    with patch():
        for impl in ("auto", "torch"):
            torch.testing.assert_close(ops.depthwise_conv2d(x, weight, impl=impl), F.conv2d(x, weight, groups=4))


def test_patch_reaches_compiled_code():
    layer, x = nn.Conv2d(4, 8, 3, groups=4), torch.randn(1, 4, 8, 8)
    targets: list[str] = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    expected = output(layer, x)
    with patch():
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        assert_near(output(compiled, x), expected)
    assert any("flashdwc" in target for target in targets)
    targets.clear()
    assert_near(output(compiled, x), expected)
    assert not any("flashdwc" in target for target in targets)


@pytest.mark.parametrize(
    "first", ["flashdwc.convert", "flashdwc.restore", "from flashdwc.convert import Report", "import flashdwc.convert"]
)
def test_the_name_means_the_function_whatever_is_imported_first(first):
    code = f"import flashdwc; {first}; flashdwc.convert(__import__('torch').nn.ReLU()); flashdwc.patch()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
