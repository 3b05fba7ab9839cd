"""Measured choices: how they are kept, that the planner obeys them, and that each way computes the same."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import emulation
import pytest
import torch
from emulation import emulated_gpu
from support import channels_last, check_convolution, check_values, geometry
from torch import Tensor

from flashdwc.bench import tuning
from flashdwc.bench.ahead import arguments_of
from flashdwc.core import tune
from flashdwc.core.backend import Backend
from flashdwc.core.errors import CacheWarning
from flashdwc.core.tune import Alternative, Alternatives
from flashdwc.kernels.cuda import depthwise_octets
from flashdwc.kernels.cuda.depthwise_problem import Axis, Problem
from flashdwc.ops.depthwise_operators import forward, input_grad, weight_grad

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def own_files(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Tables of the package and of the machine in an empty folder, for a GPU called emulated."""
    monkeypatch.setattr(tune, "TABLES", tmp_path / "package")
    monkeypatch.setattr(tune, "own_file", lambda gpu: tmp_path / "machine" / tune._file_name(gpu))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(name="emulated"))
    tune._choices.cache_clear()
    yield tmp_path
    tune._choices.cache_clear()


def test_choices_are_kept_and_added_to(own_files):
    assert tune.choice(DEVICE, "a") is None
    path = tune.keep(DEVICE, {"a": "one"})
    tune.keep(DEVICE, {"b": "two", "a": "three"})
    assert (tune.choice(DEVICE, "a"), tune.choice(DEVICE, "b")) == ("three", "two")
    assert json.loads(path.read_text()) == {"gpu": "emulated", "choices": {"a": "three", "b": "two"}}
    assert [p.name for p in path.parent.iterdir()] == ["emulated.json"]


def test_a_machines_own_choice_counts_more(own_files):
    (own_files / "package").mkdir()
    table = {"gpu": "emulated", "choices": {"a": "theirs", "b": "theirs"}}
    (own_files / "package" / "emulated.json").write_text(json.dumps(table))
    tune.keep(DEVICE, {"a": "ours"})
    assert (tune.choice(DEVICE, "a"), tune.choice(DEVICE, "b")) == ("ours", "theirs")


@pytest.mark.parametrize("content", ["", "[1]", '{"gpu": "emulated"}', '{"choices": 3}', "\x00"])
def test_an_unreadable_file_is_not_used(own_files, content):
    path = tune.own_file("emulated")
    path.parent.mkdir()
    path.write_text(content)
    with pytest.warns(CacheWarning, match="not used"):
        assert tune.choice(DEVICE, "a") is None
    with pytest.warns(CacheWarning):
        tune.keep(DEVICE, {"a": "one"})
    assert tune.choice(DEVICE, "a") == "one"


def test_a_cache_that_is_no_folder_costs_no_warning_here(own_files, recwarn):
    (own_files / "machine").touch()
    assert tune.choice(DEVICE, "a") is None
    assert not recwarn.list


def test_octets_count_the_rows_of_all_images_in_32_bits():
    few, many = (Problem(images, 64, Axis(1, 1, 3, 1, 1, 1), Axis(9, 9, 3, 1, 1, 1)) for images in (2**20, 2**30))
    for layouts in (depthwise_octets.conv_layouts, depthwise_octets.weight_grad_layouts):
        assert layouts(few, 227 * 1024) and not layouts(many, 227 * 1024)


def cuda(operator) -> Backend:
    return next(backend for backend in operator.backends if backend.name == "cuda")


def test_the_planner_obeys_a_choice_and_ignores_a_stale_one(own_files):
    x, w = torch.empty(2, 16, 20, 24, dtype=torch.half), torch.empty(16, 1, 5, 5, dtype=torch.half)
    args = (channels_last(x), w, None, (1, 1), (2, 2, 2, 2), (1, 1), "auto", "auto")
    with emulated_gpu(x, w):
        found = cuda(forward).alternatives(*args)
        rule = cuda(forward).describe(*args)
        other = next(way.name for way in found.ways if "octets" in way.name)
        assert found.chosen != other and "octets" not in rule
        tune.keep(DEVICE, {found.problem: other})
        assert cuda(forward).alternatives(*args).chosen == other
        assert "octets" in cuda(forward).describe(*args)
        tune.keep(DEVICE, {found.problem: "depthwise_direct: Strip(of another time)"})
        assert cuda(forward).describe(*args) == rule


CASES = {
    "small filter": ((1, 64, 6, 33), (3, 3), 1, 1, channels_last),
    "strided": ((2, 8, 7, 14), (3, 3), 2, 1, Tensor.contiguous),
    "contiguous": ((2, 8, 7, 14), (5, 5), 1, 2, Tensor.contiguous),
}


@pytest.mark.skipif(emulation.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", CASES)
def test_every_way_computes_the_definition(case, own_files):
    size, kernel, stride, padding, layout = CASES[case]
    x, w, b = layout(torch.randn(size).half()), torch.randn(size[1], 1, *kernel).half(), torch.randn(size[1]).half()
    at = geometry(x, w, stride, padding, 1)

    def results(operator, *args) -> dict[str, Tensor]:
        tensors = args[: operator.tensors]
        with emulated_gpu(*(t for t in tensors if t is not None)), ThreadPoolExecutor(2) as pool:
            ways = cuda(operator).alternatives(*args, "auto", "auto").ways
            plans = pool.map(lambda way: way.plan(), ways)  # compiles
            return {way.name: plan(*tensors) for way, plan in zip(ways, plans)}

    ys = results(forward, x, w, b, *at)
    y = next(iter(ys.values()))
    g = layout(torch.randn(y.shape).half())
    dxs, dws = (
        results(input_grad, g, w, tuple(x.shape), *at),
        results(weight_grad, g, x, tuple(w.shape), w.stride(), *at),
    )
    assert len(ys) >= 8 and len(dxs) >= 3 and len(dws) >= 6, "fewer ways than there are kernels and tiles"
    dx, dw = (next(iter(found.values())) for found in (dxs, dws))
    for other in ys.values():
        check_values(x, w, b, g, other, (dx, dw), *at)
    for other in dxs.values():
        check_values(x, w, b, g, y, (other, dw), *at)
    for other in dws.values():
        check_values(x, w, b, g, y, (dx, other), *at)


class FakeOperator:
    """Doubles its input, in several ways."""

    name, tensors = "double", 1

    def __init__(self, chosen: str, ways: dict) -> None:
        found = Alternatives("a problem", chosen, tuple(Alternative(n, lambda f=f: f) for n, f in ways.items()))
        self.backends = (Backend("cpu", lambda *_: None, lambda *_: lambda x: 2 * x, alternatives=lambda *_: found),)


def slow(x: Tensor) -> Tensor:
    time.sleep(0.002)
    return 2 * x


def fast(x: Tensor) -> Tensor:
    return 2 * x


def wrong(x: Tensor) -> Tensor:
    return 3 * x


def broken(x: Tensor) -> Tensor:
    raise RuntimeError("too many resources requested for launch")


def tuned(chosen: str, done: set[str]):
    ways = {chosen: {"slow": slow, "fast": fast}[chosen], "slow": slow, "wrong": wrong, "broken": broken, "fast": fast}
    return tuning.tune_call(FakeOperator(chosen, ways), (torch.ones(8), "auto"), torch.device("cpu"), done)


def test_the_fastest_right_way_is_found(monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 0.05)
    done: set[str] = set()
    found = tuned("slow", done)
    assert (found.best, found.worth_keeping, set(found.timings)) == ("fast", True, {"slow", "fast"})
    assert tuned("slow", done) is None, "the same problem again"
    assert not tuned("fast", set()).worth_keeping


def test_a_present_way_that_fails_is_an_error():
    operator = FakeOperator("broken", {"broken": broken, "fast": fast})
    with pytest.raises(RuntimeError, match="too many resources"):
        tuning.tune_call(operator, (torch.ones(8), "auto"), torch.device("cpu"), set())


def test_layers_of_shapes_and_models_are_tuned(own_files, monkeypatch):
    """Every operator of every layer is asked about; what is worth it is kept."""
    asked: list[tuple] = []

    def tune_call(operator, args, device, done):
        assert torch.isfinite(args[0]).all(), "an operand that holds nothing"
        asked.append((operator.name, tuple(args[0].shape)))
        timing = {way: tuning.Timing(ms, ms, ms, 1) for way, ms in (("a", 2.0), ("b", 1.0))}
        return tuning.Tuned(operator.name, f"problem {len(asked)}", "a", "b", timing)

    monkeypatch.setattr(tuning, "tune_call", tune_call)
    request = tuning.Request(inputs=[(3, 64, 64)], batches=[1], dtypes=["fp32"], layout="contiguous")
    lines = list(tuning.tune_all("2x8x9x9:k3:fp32", request, torch.device("cpu")))
    assert len(asked) == 3 and "b: 1.0000 ms, before 2.0000" in lines[1]
    assert tune.choice(DEVICE, "problem 3") == "b"
    lines = list(tuning.tune_all("convnext_atto", request, torch.device("cpu")))
    assert len(asked) == 3 * (1 + 12) and any("stages.3" in line and "input 1x320x2x2" in line for line in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["8x64x28x28:k5:fp16:nhwc", "8x64x28x28:k3:bf16:nchw"])
def test_tuning_on_a_gpu(shape, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "own_file", lambda gpu: tmp_path / tune._file_name(gpu))
    tune._choices.cache_clear()
    request = tuning.Request(inputs=None, batches=[1], dtypes=["fp16"], layout="contiguous")
    title, *lines = tuning.tune_all(shape, request, DEVICE)
    assert title == shape and len(lines) == 2, "the input gradient is the same problem"
    x, w, b, stride, padding, dilation = arguments_of(shape, DEVICE)
    check_convolution(x.normal_(), w.normal_(), b, stride=stride, padding=padding, dilation=dilation, impl="cuda")
    tune._choices.cache_clear()
