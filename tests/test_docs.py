"""The documentation: its examples run, its links and names exist, its speed figures are those of the results files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashdwc import cli
from flashdwc.bench.results import Row, Writer
from flashdwc.bench.timers import Ceilings
from flashdwc.core import config, errors

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
SHIM = "depthwise_conv2d_implicit_gemm"  # an example puts a module in its place
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


# --- what is written is true ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if blocks(text_of(name), "python")])
def test_examples_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, SHIM, ModuleType(SHIM))  # removed at the end
    namespace: dict = {"__name__": "example"}
    for number, block in enumerate(blocks(text_of(name), "python"), 1):
        exec(compile(block, f"{name}, example {number}", "exec"), namespace)


def test_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 150


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if not re.match(r"https?://|#", target):
            assert ((ROOT / name).parent / target.split("#")[0]).exists(), f"{name} links to {target}"


def test_every_page_is_in_the_index():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([\w.]+)\)", text_of("docs/index.md")))


def test_every_environment_variable_is_documented():
    variables = set(re.findall(r"FLASHDWC_[A-Z_]+", Path(config.__file__).read_text(encoding="utf-8")))
    assert variables == set(re.findall(r"FLASHDWC_[A-Z_]+", text_of("README.md")))
    for implementation in config.IMPLEMENTATIONS:
        assert f"`{implementation}`" in text_of("README.md")


def test_every_exception_is_documented():
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    names = {value.__name__ for value in classes if issubclass(value, RuntimeError)}
    missing = {name for name in names if f"`{name}`" not in text_of("docs/depthwise.md")}
    assert not missing


def subcommands() -> dict[str, argparse.ArgumentParser]:
    for action in cli._parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("the command line has no commands")


@pytest.mark.parametrize("command", subcommands())
def test_every_command_and_option_is_documented(command):
    assert f"`flashdwc {command}" in text_of("README.md")
    section = text_of("docs/cli.md").split(f"\n## {command}\n")[1].split("\n## ")[0]
    options = {o for action in subcommands()[command]._actions for o in action.option_strings if o.startswith("--")}
    for option in options - {"--help"}:
        assert option in section, f"{option} of {command}"
    documented = set(re.findall(r"--[a-z][a-z-]*", section))
    known = {o for parser in subcommands().values() for action in parser._actions for o in action.option_strings}
    assert documented <= known


def test_every_suite_is_documented():
    for suite in cli.SUITE_NAMES:
        assert f"| `{suite}` |" in text_of("docs/cli.md")


def test_files_that_are_named_exist():
    pattern = r"`((?:ops|kernels|core|nn|models|bench|tests|benchmarks)/[\w/]+\.\w+)`"
    for name in NAMES:
        for path in re.findall(pattern, text_of(name)):
            assert any((base / path).exists() for base in (ROOT, ROOT / "src/flashdwc")), f"{name} names {path}"


# --- nothing that belongs to one machine ------------------------------------------------------------------------------


def repository_texts() -> Iterator[Path]:
    for pattern in ("*.md", "*.toml", "Makefile", ".ci/*", "src/**/*", "tests/**/*", "docs/**/*", "benchmarks/**/*"):
        for path in ROOT.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                yield path


def test_no_registry_hosts_and_no_machine_paths():
    hosts = ["pypi" + ".org", "python" + "hosted.org", "download." + "pytorch.org", "conda" + ".anaconda.org"]
    machine = re.compile(r"(?<![\w.*/])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me/\\w+"]) + r")(?:/|\b)")
    for path in repository_texts():
        content = path.read_text(encoding="utf-8", errors="replace")
        found = [host for host in hosts if host in content] + machine.findall(content)
        assert not found, f"{path.relative_to(ROOT)}: {found}"


# --- speed figures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def update_docs() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("update_docs", ROOT / "benchmarks/update_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["update_docs"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The documents without results."""
    shutil.copy(README, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "benchmarks/results/h200").mkdir(parents=True)
    return tmp_path


RUN = {
    "device": "NVIDIA H200",
    "torch": "2.99.0",
    "cudnn": 90000,
    "commit": "0123456789abcdef0123",
    "date": "2031-02-03T04:05:06+00:00",
}


def measurement(kernel: int, direction: str = "forward", **fields) -> Row:
    row = Row("paper", f"K={kernel}", f"128x256x64x64:k{kernel}", 128, 256, 64, 64, kernel, kernel, 1, 1, 1,
              "fp16", "channels_last", direction, ms=1.0, ratio=2.0, floor_fraction=0.5)  # fmt: skip
    for name, value in fields.items():
        setattr(row, name, value)
    return row


def write_results(root: Path, name: str, rows: list[Row], **run) -> None:
    folder = root / name
    folder.mkdir()
    writer = Writer(folder, {**RUN, **run}, Ceilings(1.0, {}))
    for row in rows:
        writer.add(row)
    writer.close()
    shutil.move(folder / "results.json", root / f"benchmarks/results/h200/{name}.json")


@pytest.mark.parametrize("name", NAMES)
def test_no_speed_figure_is_written_by_hand(name):
    by_hand = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text_of(name), flags=re.DOTALL)
    assert not re.findall(r"\d(?:x|\s?(?:ms|us|µs|TFLOP/s|GB/s|TB/s)|\stimes)\b", by_hand)


def test_figures_are_those_of_the_results(update_docs, capsys):
    assert update_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_check_changes_nothing_and_update_settles_it(update_docs, copy):
    write_results(copy, "paper", [measurement(7)])
    before = (copy / "README.md").read_text()
    assert update_docs.main(["--check"], root=copy) == 1
    assert (copy / "README.md").read_text() == before
    assert update_docs.main([], root=copy) == 0
    assert update_docs.main(["--check"], root=copy) == 0
    (copy / "README.md").write_text((copy / "README.md").read_text().replace("2.0x", "9.0x"))
    assert update_docs.main(["--check"], root=copy) == 1


def test_without_results_it_says_so(update_docs, copy):
    update_docs.main([], root=copy)
    for name in ("README.md", "docs/performance.md"):
        assert "Not measured yet." in (copy / name).read_text()
    assert "not measured yet" in (copy / "docs/images/speedup.svg").read_text()


def test_tables_name_machine_versions_commit_and_date(update_docs, copy):
    rows = [measurement(7, ms=0.25, ratio=4.0), measurement(31, "weight_grad", ms=1.5, ratio=50.0), measurement(4096)]
    slow = measurement(7, suite="mobile", shape="1x8x7x7:k7", n=1, dtype="bf16", ratio=0.5)
    skipped = measurement(51, status="skipped", reason="needs 9 GB of memory", ms=None, ratio=None)
    write_results(copy, "all", [*rows, slow, skipped])
    update_docs.main([], root=copy)
    for name in ("README.md", "docs/performance.md"):
        text = (copy / name).read_text()
        assert "NVIDIA H200, torch 2.99.0, cuDNN 90000, commit 0123456789, 2031-02-03" in text
        assert "Not measured" not in text
    readme = (copy / "README.md").read_text()
    assert "| 7x7 | 0.250 ms, 4.0x | - | - |" in readme
    assert "| 31x31 | - | - | 1.500 ms, 50.0x |" in readme
    assert "| mobile | 1 | 0.50x | 0.50x (1x8x7x7:k7) |" in readme
    assert len(readme.splitlines()) <= 150
    performance = (copy / "docs/performance.md").read_text()
    assert "### mobile" in performance
    assert "1 skipped: needs 9 GB of memory." in performance
    assert "drawn from" in (copy / "docs/images/speedup.svg").read_text()


def test_the_later_of_two_measurements_counts(update_docs, copy):
    write_results(copy, "a", [measurement(7, ratio=3.0)], date="2031-02-04T00:00:00+00:00")
    write_results(copy, "b", [measurement(7, ratio=9.0)], date="2031-02-03T00:00:00+00:00")
    update_docs.main([], root=copy)
    assert "3.0x" in (copy / "README.md").read_text()
    assert "9.0x" not in (copy / "README.md").read_text()


def test_the_plot_is_the_same_from_run_to_run(update_docs):
    series = {"forward": [(3, 1.5), (31, 40.0)], "weight_grad": [(3, 0.9)]}
    mark = update_docs.plot_mark(series, "a GPU")
    assert update_docs.draw(series, "a GPU", mark) == update_docs.draw(series, "a GPU", mark)
    assert mark in update_docs.draw(series, "a GPU", mark)
    assert mark != update_docs.plot_mark({"forward": [(3, 1.6)]}, "a GPU")


def test_readme_stays_short_with_every_suite_measured(update_docs, copy):
    rows = [measurement(k, d) for k in update_docs.LAYER_KERNELS for d in update_docs.GRADIENTS]
    rows += [measurement(7, suite=suite) for suite in cli.SUITE_NAMES]
    write_results(copy, "all", rows)
    update_docs.main([], root=copy)
    assert len((copy / "README.md").read_text().splitlines()) <= 150


def test_script_runs_by_itself():
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "benchmarks/update_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_results_are_whole():
    for path in (ROOT / "benchmarks/results").glob("*/*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert {"device", "torch", "commit", "date"} <= set(content["run"]), path.name
        assert content["rows"], path.name
        assert torch.tensor([row["ms"] for row in content["rows"] if row["status"] == "ok"]).isfinite().all(), path.name
