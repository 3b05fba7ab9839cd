"""The benchmark registry, its timers, its rows and the files they end in."""

from __future__ import annotations

import csv
import json
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F

from flashdwc.bench import command, runner
from flashdwc.bench.case import DIRECTIONS, DTYPES, LAYOUTS, Case, parse
from flashdwc.bench.friendly import UserError
from flashdwc.bench.page import Cell, Page
from flashdwc.bench.results import CSV_COLUMNS, Writer, environment
from flashdwc.bench.sides import Operands, ours, torchs
from flashdwc.bench.suites import SUITES
from flashdwc.bench.timers import Ceilings, Timing, compare, measure_ceilings

CPU = torch.device("cpu")
CEILINGS = Ceilings(20.0, {"fp32": 0.1})
SMALL = {
    "plain": Case("plain", 2, 5, 9, 8, (3, 3)),
    "strip": Case("strip", 1, 4, 9, 8, (1, 7)),
    "stride": Case("stride", 2, 3, 9, 10, (5, 5), stride=2),
    "dilation": Case("dilation", 1, 3, 11, 12, (3, 3), dilation=3),
    "multiplier": Case("multiplier", 2, 3, 7, 7, (3, 3), multiplier=2),
    "causal": Case("causal", 2, 3, 1, 12, (1, 4), padding=(3, 0, 0, 0)),
    "sliced": Case("sliced", 2, 4, 9, 8, (3, 3), sliced=True),
}
ALL_CASES = [(suite.name, case) for suite in SUITES.values() for case in suite.cases]


@pytest.fixture
def options(tmp_path):
    return runner.Options(["mobile"], CPU, dtypes=["fp32"], quick=True, limit=1, out=tmp_path)


def test_suites_hold_the_published_layers():
    counts = {name: len(suite.cases) for name, suite in SUITES.items()}
    assert counts == {"paper": 36, "thcunn": 27, "models": 391, "mobile": 63, "conv1d": 4, "stress": 9}
    assert Case("64² x 256, K=31", 128, 256, 64, 64, (31, 31)) in SUITES["paper"].cases
    assert Case("MobileNet", 64, 1024, 7, 7, (3, 3), stride=2) in SUITES["thcunn"].cases
    assert Case("SLaK-T tall stage 2", 8, 249, 28, 28, (49, 5)) in SUITES["models"].cases
    assert Case("EfficientNet-B0", 1, 672, 14, 14, (5, 5), stride=2) in SUITES["mobile"].cases
    assert any(case.n * case.c * case.h * case.w > 2**31 for case in SUITES["stress"].cases)


@pytest.mark.parametrize("suite", SUITES)
def test_output_shapes_are_pytorchs(suite):
    for case in SUITES[suite].cases:
        left, right, top, bottom = case.pads
        x = torch.empty(case.n, case.c, case.h + top + bottom, case.w + left + right, device="meta")
        y = F.conv2d(x, torch.empty(case.weight_shape, device="meta"), None, case.stride, 0, case.dilation, case.c)
        assert tuple(y.shape) == case.output_shape


def test_specs_read_back():
    for _, case in ALL_CASES:
        read, dtype, layout = parse(case.spec + ":bf16:nchw")
        assert (read.input_shape, read.kernel, read.stride, read.dilation) == (
            case.input_shape, case.kernel, case.stride, case.dilation,
        )  # fmt: skip
        assert (dtype, layout) == ("bf16", "contiguous")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("8x96", "NxCxHxW"),
        ("8x96x14x14:q3", "'q3'"),
        ("8x96x14x14:k0", "at least 1"),
        ("8x96x14x14:fp8", "'fp8'"),
        ("1x8x3x3:k9:p0", "larger than the padded input"),
    ],
)
def test_bad_shapes_name_the_part(text, part):
    with pytest.raises(UserError, match=part):
        parse(text)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SMALL)
def test_both_sides_compute_the_same(name, layout):
    case = SMALL[name]
    operands = Operands.make(case, torch.float64, CPU).to(layout, sliced=case.sliced)
    assert tuple(operands.grad.shape) == case.output_shape
    assert operands.x.is_contiguous(memory_format=LAYOUTS[layout]) != case.sliced
    for direction in DIRECTIONS:
        torch.testing.assert_close(ours(case, direction, operands)(), torchs(case, direction, operands)())


def test_timing_takes_quantiles():
    assert Timing.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Timing(3.0, pytest.approx(1.8), pytest.approx(4.2), 5)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_candidates_take_turns():
    calls = []
    slow = torch.randn(300, 300)

    def candidate(name):
        def run():
            calls.append(name)
            return slow @ slow @ slow

        return run

    timings = compare({"a": candidate("a"), "b": candidate("b")}, CPU, seconds=0.05, max_rounds=8)
    assert timings["a"].samples == timings["b"].samples >= 5
    order = [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]
    assert len(order) >= 6, "each round runs both"


def test_floor_is_the_tighter_ceiling():
    ceilings = Ceilings(copy_gbytes=100.0, gemm_tflops={"fp32": 1.0, "tf32": 2.0, "fp16": 0.5})
    assert ceilings.floor_ms(flops=2_000_000_000, bytes_moved=1000, dtype="fp32") == (pytest.approx(1.0), "compute")
    assert ceilings.floor_ms(flops=1000, bytes_moved=100_000_000, dtype="fp32") == (pytest.approx(1.0), "memory")
    assert ceilings.rate("fp16") == 1.0, "half precision may be computed in float32"


def test_ceilings_are_measured():
    ceilings = measure_ceilings(CPU, {"fp32": torch.float32}, quick=True)
    assert ceilings.copy_gbytes > 0.1
    assert ceilings.gemm_tflops["fp32"] > 1e-4


def test_options_are_checked(options):
    runner.check(options)
    for change in ({"dtypes": ["fp8"]}, {"layouts": ["nhwc"]}, {"directions": ["sideways"]}):
        with pytest.raises(UserError, match="expected one of"):
            runner.check(runner.Options(["mobile"], CPU, **change))
    with pytest.raises(UserError, match="no case"):
        runner.plan(runner.Options(["mobile"], CPU, filter="no such layer"))


def test_plan_follows_the_filters():
    jobs = runner.plan(runner.Options(["mobile", "thcunn"], CPU, dtypes=["fp16"], batches=[2, 4], filter="k3", limit=3))
    assert [job.suite for job in jobs] == ["mobile"] * 9 + ["thcunn"] * 3
    assert {job.case.n for job in jobs} == {2, 4}
    assert [job.direction for job in jobs[:3]] == ["forward", "input_grad", "weight_grad"]
    assert {job.direction for job in jobs[9:]} == {"train"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_are_complete(options, direction):
    job = runner.Job("stress", SMALL["plain"], "fp32", direction)
    rows = runner.measure(job, options, CEILINGS)
    assert [row.layout for row in rows] == ["channels_last", "contiguous"]
    for row in rows:
        assert row.status == "ok", row.reason
        assert row.backend
        assert row.p20 <= row.ms <= row.p80
        assert row.ratio == pytest.approx(row.best_baseline_ms / row.ms)
        assert row.best_baseline_ms == min(timing["median"] for timing in row.baselines.values())
        assert set(row.baselines) == {"torch_channels_last", "torch_contiguous"}
        assert row.tflops == pytest.approx(job.case.flops(direction) / row.ms / 1e9)
        assert row.floor_fraction == pytest.approx(row.floor_ms / row.ms)
        assert row.max_difference < 1e-5


def test_cases_that_do_not_fit_are_skipped(options, monkeypatch):
    job = runner.Job("stress", SMALL["plain"], "fp32", "forward")
    monkeypatch.setattr(runner, "available_memory", lambda device: 1000)
    assert {(row.status, "memory" in row.reason) for row in runner.measure(job, options, CEILINGS)} == {
        ("skipped", True)
    }
    monkeypatch.undo()

    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")

    monkeypatch.setattr(runner, "ours", exhausted)
    rows = runner.measure(job, options, CEILINGS)
    assert {(row.status, row.reason) for row in rows} == {("skipped", "out of memory: CUDA out of memory.")}


def test_large_cases_are_left_out_of_quick_runs(options):
    huge = next(case for case in SUITES["stress"].cases if "2^31" in case.name)
    rows = runner.measure(runner.Job("stress", huge, "fp32", "forward"), options, CEILINGS)
    assert {row.status for row in rows} == {"skipped"}
    assert "--quick" in rows[0].reason


def test_failures_are_rows_too(options, monkeypatch):
    def broken(*_, **__):
        def run():
            raise ValueError("does not work\nat all")

        return run

    job = runner.Job("stress", SMALL["plain"], "fp32", "forward")
    monkeypatch.setattr(runner, "ours", broken)
    rows = runner.measure(job, options, CEILINGS)
    assert {(row.status, row.reason) for row in rows} == {("failed", "ValueError: does not work")}
    monkeypatch.undo()
    monkeypatch.setattr(runner, "torchs", broken)
    (row, _) = runner.measure(job, options, CEILINGS)
    assert row.status == "ok"
    assert row.ratio is None
    assert row.baseline_errors["torch_contiguous"] == "ValueError: does not work"


def test_files_are_whole_after_every_row(tmp_path, options):
    (first, second) = runner.measure(runner.Job("stress", SMALL["strip"], "fp32", "forward"), options, CEILINGS)
    with closing(Writer(tmp_path, environment(CPU), CEILINGS)) as writer:
        assert json.loads((tmp_path / "results.json").read_text())["rows"] == []
        for count, row in enumerate((first, second), 1):
            writer.add(row)
            stored = json.loads((tmp_path / "results.json").read_text())
            assert [row["layout"] for row in stored["rows"]] == ["channels_last", "contiguous"][:count]
            with (tmp_path / "results.csv").open(newline="") as file:
                assert len(list(csv.DictReader(file))) == count
    assert stored["run"]["torch"] == torch.__version__
    assert stored["run"]["ceilings"]["copy_gbytes"] == 20.0
    assert stored["rows"][0]["baselines"]["torch_contiguous"]["median"] > 0


def test_an_interrupted_run_keeps_its_rows(options, monkeypatch, capsys):
    measure, calls = runner.measure, []

    def interrupted(job, *rest):
        if calls:
            raise KeyboardInterrupt
        calls.append(job)
        return measure(job, *rest)

    monkeypatch.setattr(runner, "measure", interrupted)
    assert command.run(options) == 130
    assert len(json.loads((options.out / "results.json").read_text())["rows"]) == 2
    assert (options.out / "report.html").stat().st_size > 1000
    assert "interrupted after 2 rows" in capsys.readouterr().out


def test_a_run_leaves_json_csv_plots_and_a_page(options, capsys):
    assert command.run(options) == 0
    stored = json.loads((options.out / "results.json").read_text())
    assert {"device", "torch", "flashdwc", "commit", "date", "ceilings", "cpu_threads"} <= stored["run"].keys()
    assert [(row["layout"], row["direction"]) for row in stored["rows"]] == [
        (layout, direction) for direction in ("forward", "input_grad", "weight_grad") for layout in LAYOUTS
    ]
    with (options.out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == CSV_COLUMNS
    assert float(rows[0]["torch_contiguous_ms"]) > 0
    plots = {path.name for path in (options.out / "plots").iterdir()}
    assert {"mobile-forward-fp32.svg", "mobile-weight_grad-fp32.svg", "roofline-fp32.svg"} <= plots
    page = (options.out / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == len(plots)
    for link in ("http:", "https:", "<script", "<link"):
        assert link not in page, "the page stands alone"
    assert "geometric mean" in capsys.readouterr().out


def test_pages_escape_what_they_are_given():
    page = Page("a < b", "lead & more")
    page.cards([("1", "<card>", "")])
    page.section("<section>", "<text>")
    page.table(("<column>",), [(Cell("<cell>", "good"),)])
    with page.fold("<summary>"):
        page.note("<note>")
    html = page.html()
    for name in ("card", "section", "text", "column", "cell", "summary", "note"):
        assert f"&lt;{name}&gt;" in html
    assert html.count("<section>") == html.count("</section>") == 1


def test_every_dtype_has_a_name():
    assert {torch.float16, torch.bfloat16, torch.float32, torch.float64} == set(DTYPES.values())
