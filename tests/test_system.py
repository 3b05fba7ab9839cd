"""The package as part of a process: import, fork, threads, settings, and the kernel cache.

Where a docstring names an address, somebody reported there the fault that the test guards against.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import check_convolution, run_python
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flashdwc
from flashdwc import depthwise_conv2d
from flashdwc.core import backend, config, jit
from flashdwc.core.errors import CacheWarning
from flashdwc.nn import DepthwiseConv2d

ARCH = "sm_90a"
needs_compiler = pytest.mark.skipif(jit.why_unavailable() is not None, reason="cuda-core is not installed")


# --- import and processes --------------------------------------------------------------------------------------------


def test_import_initialises_nothing():
    """A compilation at import made forked workers die. https://github.com/NVIDIA/TransformerEngine/issues/872"""
    run_python(
        """
        import os, sys, threading, torch
        modules = set(sys.modules)
        import flashdwc
        flashdwc.depthwise_conv2d, flashdwc.nn, flashdwc.models, flashdwc.explain
        assert not torch.cuda.is_initialized()
        assert threading.active_count() == 1
        assert not any(name == "triton" or name.startswith("cuda.bindings") for name in set(sys.modules) - modules)
        assert not os.listdir(os.environ["FLASHDWC_CACHE_DIR"])
        child = os.fork()
        if child == 0:
            x = torch.randn(1, 2, 5, 5, device="cuda" if torch.cuda.is_available() else "cpu")
            y = flashdwc.depthwise_conv2d(x.half(), torch.ones(2, 1, 3, 3, device=x.device).half())
            os._exit(0 if y.isfinite().all() else 1)
        assert os.waitpid(child, 0)[1] == 0
    """,
        FLASHDWC_CACHE_DIR=empty_directory(),
    )


def empty_directory() -> str:
    import tempfile

    return tempfile.mkdtemp(dir=os.environ["FLASHDWC_CACHE_DIR"])


def test_import_costs_little():
    seconds = []
    for _ in range(3):
        result = run_python("""
            import time, torch
            start = time.perf_counter()
            import flashdwc
            print(time.perf_counter() - start)
        """)
        seconds.append(float(result.stdout))
    assert min(seconds) < 0.15


def test_first_calls_import_little():
    """Helpers of PyTorch's that want its symbolic algebra took a second in each new process."""
    run_python("""
        import sys, torch, flashdwc
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            x = torch.randn(1, 4, 9, 9, device=device, dtype=torch.bfloat16, requires_grad=True)
            layer = flashdwc.nn.DepthwiseConv2d(4, 4, 3, padding=1, groups=4).to(x)
            layer(x).sum().backward()
        assert "sympy" not in sys.modules
    """)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_cpu_calls_keep_their_memory():
    """In a young process every call had its temporary tensors' pages from the system anew, a thousand and more."""
    result = run_python("""
        import resource, torch, flashdwc

        def step():
            torch.autograd.grad(flashdwc.depthwise_conv2d(x, w, padding=3).sum(), (x, w))

        x, w = torch.randn(1, 96, 56, 56, requires_grad=True), torch.randn(96, 1, 7, 7, requires_grad=True)
        for _ in range(5):
            step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            step()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
    """)
    assert int(result.stdout) < 200


def test_import_without_triton_and_without_the_compiler():
    """A part that failed to load took the whole package with it. https://github.com/Dao-AILab/causal-conv1d/issues/77"""
    result = run_python("""
        import sys, torch
        sys.modules["triton"] = None

        class WithoutCuda:  # finds all that is installed but cuda.*
            @staticmethod
            def find_spec(name, path=None, target=None):
                return None if name.split(".")[0] == "cuda" else finder.find_spec(name, path, target)

        finder = sys.meta_path[-1]
        sys.meta_path[-1] = WithoutCuda
        for name in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
            del sys.modules[name]
        import flashdwc
        print(tuple(flashdwc.depthwise_conv2d(torch.randn(1, 2, 5, 5), torch.randn(2, 1, 3, 3)).shape))
        from flashdwc.core import jit
        print(jit.why_unavailable())
    """)
    assert "(1, 2, 3, 3)" in result.stdout
    assert "cuda-core" in result.stdout


@needs_compiler
def test_a_compiler_that_does_not_load_is_a_reason(monkeypatch):
    """A broken extension shall name versions and the remedy. https://github.com/Dao-AILab/causal-conv1d/issues/77"""

    def broken() -> None:
        raise ImportError("undefined symbol: nvrtc")

    monkeypatch.setattr(jit, "_cuda_core", broken)
    jit.why_unavailable.cache_clear()
    try:
        assert re.search(r"undefined symbol: nvrtc\): pip install", jit.why_unavailable())
    finally:
        jit.why_unavailable.cache_clear()


def test_fork_after_use():
    """https://github.com/pytorch/pytorch/issues/40403"""
    run_python(
        """
        import os, torch
        from flashdwc import depthwise_conv2d
        torch.set_num_threads(1)
        x, w = torch.randn(2, 4, 9, 9), torch.randn(4, 1, 3, 3)
        expected = depthwise_conv2d(x, w, padding=1)
        from flashdwc.core import jit
        with jit._lock:  # held by another thread of the parent, for all that the child knows
            child = os.fork()
        if child == 0:
            with jit._lock:
                same = torch.equal(depthwise_conv2d(x, w, padding=1), expected)
                new = depthwise_conv2d(x[..., 1:], w).isfinite().all()
            os._exit(0 if same and new else 1)
        assert os.waitpid(child, 0)[1] == 0
    """,
        timeout=60,
    )


def test_data_loader_workers():
    run_python(
        """
        import torch
        from torch.utils.data import DataLoader, Dataset
        from flashdwc import depthwise_conv2d

        class Filtered(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                return depthwise_conv2d(torch.full((2, 5, 5), float(i)), torch.ones(2, 1, 3, 3))

        depthwise_conv2d(torch.ones(2, 5, 5), torch.ones(2, 1, 3, 3))
        if __name__ == "__main__":
            batches = list(DataLoader(Filtered(), batch_size=2, num_workers=2, multiprocessing_context="fork"))
            assert torch.equal(torch.cat(batches)[:, 0, 0, 0], torch.arange(4.0) * 9)
    """,
        timeout=60,
    )


def test_eight_threads_on_one_operator():
    start = threading.Barrier(8)

    def hammer(i: int) -> None:
        generator = torch.Generator().manual_seed(i)
        start.wait()
        for n in range(12):
            size = (1 + i % 3, 2 + i, 6 + n, 7 + (i * n) % 5)
            x, w = torch.randn(size, generator=generator), torch.randn(size[1], 1, 3, 3, generator=generator)
            check_convolution(x, w, g=torch.randn(size, generator=generator), padding=1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hammer, range(8)))


def test_a_call_like_an_earlier_one_is_still_checked_and_seen_by_all():
    """A second call skips the checks that the first has passed; whatever differs from the first goes the long way."""
    x, w, b = torch.randn(2, 4, 9, 9), torch.randn(4, 1, 3, 3), torch.randn(4)

    def call(x=x, w=w, b=b, padding=1, **options):
        return depthwise_conv2d(x, w, b, 1, padding, **options)

    expected = call()
    assert torch.equal(call(), expected)
    assert torch.equal(call(padding=[1, 1]), expected)  # a list has no hash
    assert not call().requires_grad
    assert call(w=w.requires_grad_()).requires_grad
    call(w=w).sum().backward()
    assert w.grad is not None
    w = w.detach()
    for wrong, message in (
        ({"b": b.double()}, "bias: expected the dtype"),
        ({"w": torch.randn(6, 1, 3, 3)}, "weight: expected shape"),
        ({"padding": -1}, "padding: expected non-negative"),
        ({"padding_mode": "none"}, "padding_mode: expected"),
        ({"impl": "best"}, "impl"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call(**wrong)
    with torch.autocast("cpu", torch.bfloat16):
        assert call().dtype is torch.bfloat16
    torch.testing.assert_close(torch.func.vmap(lambda x: call(x=x[None])[0])(x), expected)
    _, tangent = torch.func.jvp(lambda x: call(x=x), (x,), (x,))
    torch.testing.assert_close(tangent, expected - b.view(-1, 1, 1))
    assert torch.equal(call(), expected)
    call().add_(1)
    assert torch.equal(call(), expected)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(call(), FakeTensor)
    graph = make_fx(lambda x: call(x=x))(x)
    assert any("flashdwc" in str(node.target) for node in graph.graph.nodes)


def test_plans_are_bounded(monkeypatch):
    from flashdwc.core import op
    from flashdwc.ops.depthwise import forward

    monkeypatch.setattr(op, "MAX_PLANS", 8)
    forward._plans.clear(), forward._calls.clear()
    for n in range(3, 40):
        depthwise_conv2d(torch.randn(1, 2, n, 3), torch.randn(2, 1, 3, 3))
        assert len(forward._plans) <= 8
        assert len(forward._calls) <= 8


# --- tracers ---------------------------------------------------------------------------------------------------------


def test_one_dynamic_graph_serves_all_shapes():
    """Calls without a fake kernel broke the graph. https://github.com/pytorch/pytorch/issues/116182"""
    torch.compiler.reset()
    model = nn.Sequential(DepthwiseConv2d(3, 6, 5, padding=2, groups=3), nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for images, height in ((2, 8), (3, 9), (4, 16)):
            x = torch.randn(images, 3, height, height + 1, requires_grad=True)
            ours, theirs = compiled(x), model(x)
            torch.testing.assert_close(ours, theirs)
            leaves = [x, *model.parameters()]
            torch.testing.assert_close(
                torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves)
            )


@pytest.mark.parametrize("padding", ["same", 1])
def test_export_with_a_dynamic_batch_then_trace_then_save(padding, tmp_path):
    """``padding="same"`` could not be exported. https://github.com/pytorch/pytorch/issues/68880"""
    model = nn.Sequential(DepthwiseConv2d(3, 6, 4, padding=padding, groups=3), nn.ReLU()).eval()
    x, other = torch.randn(2, 3, 8, 9), torch.randn(5, 3, 8, 9)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    torch.export.save(exported, tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(other), model(other))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(model, x), tmp_path / "model.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(other), model(other))


def test_autocast_of_a_layer():
    """Mixed types reached the kernel. https://github.com/myownskyW7/CARAFE/issues/6"""
    layer, x = DepthwiseConv2d(4, 4, 3, padding=1, groups=4), torch.randn(2, 4, 8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(layer(x))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert {t.grad.dtype for t in (x, layer.weight, layer.bias)} == {torch.float32}
    with pytest.raises(TypeError, match="dtype"):
        layer(x.half())


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_read_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHDWC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHDWC_IMPL", "torch")
    monkeypatch.setenv("FLASHDWC_VERBOSE", "1")
    assert config.Config.from_environment() == config.Config(tmp_path, "torch", True)
    monkeypatch.setenv("FLASHDWC_IMPL", "fast")
    with pytest.raises(ValueError, match=r"FLASHDWC_IMPL: expected .*cuda.*, got 'fast'"):
        _ = config.Config.from_environment().impl


def test_cache_directory_follows_xdg(monkeypatch, tmp_path):
    for name in ("FLASHDWC_CACHE_DIR", "FLASHDWC_IMPL", "FLASHDWC_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.Config.from_environment() == config.Config(tmp_path / "flashdwc", "auto", False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.Config.from_environment().cache_dir == tmp_path / ".cache" / "flashdwc"
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert config.Config.from_environment().cache_dir.name == "flashdwc"


def test_implementation_from_the_environment():
    result = run_python(
        """
        import torch, flashdwc
        print(flashdwc.explain(flashdwc.depthwise_conv2d, torch.randn(1, 2, 5, 5), torch.randn(2, 1, 3, 3)).chosen)
        flashdwc.depthwise_conv2d(torch.randn(1, 2, 5, 5), torch.randn(2, 1, 3, 3))
    """,
        FLASHDWC_IMPL="torch",
    )
    assert result.stdout == "torch\n"
    call = "import flashdwc, torch; flashdwc.depthwise_conv2d(torch.ones(1, 2, 5, 5), torch.ones(2, 1, 3, 3))"
    wrong = run_python(call, FLASHDWC_IMPL="fast", check=False)
    assert wrong.returncode != 0
    assert "FLASHDWC_IMPL: expected one of" in wrong.stderr
    command = run_python(
        "from flashdwc.cli import main; raise SystemExit(main(['explain', '1x2x5x5']))",
        FLASHDWC_IMPL="fast",
        check=False,
    )
    assert command.returncode == 1
    assert command.stderr.splitlines()[-1].startswith("flashdwc: FLASHDWC_IMPL: expected one of")
    assert "Traceback" not in command.stderr


def test_environment_variables_are_few_and_in_one_place():
    package = Path(flashdwc.__file__).parent
    readers = [path.relative_to(package) for path in package.rglob("*.py") if "os.environ" in path.read_text()]
    assert readers == [Path("core/config.py")]


# --- the kernel cache ------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    use_cache(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


def use_cache(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(jit, "config", config.Config(directory, "auto", False))
    monkeypatch.setattr(jit, "_warned_about_cache", False)


def build() -> bytes:
    return jit.build("reduce_partials", {"BF16": 0}, ARCH)


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    made: list[str] = []
    compile_source = jit.compile_source
    monkeypatch.setattr(
        jit, "compile_source", lambda *args, **kw: (made.append(args[1]), compile_source(*args, **kw))[1]
    )
    return made


@needs_compiler
def test_compiled_once_and_kept_with_its_source(cache, compilations):
    first = build()
    assert build() == first
    assert len(compilations) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".cu", ".cubin"]  # and nothing temporary
    (source,) = cache.glob("*.cu")
    assert "#define BF16 0" in source.read_text()


@needs_compiler
@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty", "nothing but a checksum"])
def test_damaged_entry_is_compiled_again(damage, cache, compilations):
    good = build()
    (entry,) = cache.glob("*.cubin")
    content = entry.read_bytes()
    flipped = content[:100] + bytes([content[100] ^ 1]) + content[101:]
    entry.write_bytes(
        {"cut short": content[:-7], "one bit": flipped, "empty": b"", "nothing but a checksum": content[:32]}[damage]
    )
    assert build() == good
    assert len(compilations) == 2
    assert entry.read_bytes() == content


@needs_compiler
def test_key_covers_macros_architecture_and_headers(cache, monkeypatch):
    build()
    jit.build("reduce_partials", {"BF16": 1}, ARCH)
    jit.build("reduce_partials", {"BF16": 0}, "sm_80")
    monkeypatch.setattr(jit, "_sources_digest", lambda: "another header")
    build()
    monkeypatch.setattr(jit, "compiler_version", lambda: "99.9")
    build()
    assert len(list(cache.glob("*.cubin"))) == 5


@needs_compiler
def test_unwritable_cache_falls_back_with_one_warning(tmp_path, monkeypatch, compilations):
    """Read-only homes in containers raised. https://github.com/dphnAI/sonar/issues/458"""
    (tmp_path / "file").write_text("a file, not a directory")
    use_cache(monkeypatch, tmp_path / "file" / "cache")
    with pytest.warns(CacheWarning, match="FLASHDWC_CACHE_DIR") as record:
        kernels = [build() for _ in range(3)]
    assert len(record) == 1
    assert kernels[0] == kernels[1] == kernels[2]
    assert len(compilations) == 3


@needs_compiler
def test_a_full_disk_leaves_no_half_entry(cache, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit.os, "replace", refuse)
    with pytest.warns(CacheWarning, match="No space left"):
        build()
    assert not list(cache.glob("*.cubin"))


@needs_compiler
def test_processes_that_share_a_cold_cache(tmp_path):
    """Half-written entries were read. https://github.com/triton-lang/triton/issues/1509"""
    code = """
        import hashlib
        from flashdwc.core import jit
        kernels = [jit.build("reduce_partials", {"BF16": b}, "sm_90a") for b in (0, 1)]
        print(hashlib.sha256(b"".join(kernels)).hexdigest())
    """
    with ThreadPoolExecutor(4) as pool:
        runs = pool.map(lambda _: run_python(code, FLASHDWC_CACHE_DIR=str(tmp_path)).stdout, range(4))
    assert len(set(runs)) == 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".cu", ".cu", ".cubin", ".cubin"]


@needs_compiler
def test_first_kernel_of_eight_threads(tmp_path):
    """Threads that loaded the compiler at once found half of it."""
    code = """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from flashdwc.core import jit

        start = threading.Barrier(8)

        def build(i):
            start.wait()
            return jit.build("reduce_partials", {"BF16": i % 2}, "sm_90a")

        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(build, range(8)))) == 2
    """
    run_python(code, FLASHDWC_CACHE_DIR=str(tmp_path))


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_runs_nothing_and_says_why():
    x, w = torch.randn(1, 2, 5, 5), torch.randn(2, 1, 3, 3)
    explanation = flashdwc.explain(depthwise_conv2d, x, w, padding=1)
    assert isinstance(explanation, backend.Explanation)
    assert (explanation.operator, explanation.chosen) == ("depthwise_conv", "cpu")
    assert dict(explanation.backends)["cuda"] == "the tensors are on cpu"
    assert explanation.bytes == 4 * (50 + 18 + 50)
    assert explanation.flops == 2 * 50 * 9
    assert [g.operator for g in explanation.gradients] == ["depthwise_conv_input_grad", "depthwise_conv_weight_grad"]
    assert "the tensors are on cpu" in str(explanation)
    assert flashdwc.explain(depthwise_conv2d, x.to("meta"), w.to("meta")).chosen == "torch"
