"""Rates scaled by a run of one's own: the run's own step is met, other setups follow, another GPU is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench import estimate, plan_training
from fsdp_bench.plan.measured_run import MeasuredRun, read_run
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.ranges import prediction_errors
from fsdp_bench.plan.scaling import ScaledRates, scale_rates
from fsdp_bench.plan.speed import speed
from fsdp_bench.rates.datasheet import HOOK_SECONDS, LAUNCH_SECONDS
from fsdp_bench.rates.scaled import SCALED, WITH_OWN_HOST
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.spec.calibration_profile import Scaling, read_calibration, read_profile, write_profile
from tests.conftest import json_of, message_of, refused, stdout_of
from tests.plan.test_measured_run import STEPS, kernel, trace

MODEL, SERVER = "Llama-3.1-8B", "p5.48xlarge"
RUN = ("--model", MODEL, "--server", SERVER)


def predicted(**more: Any) -> Prediction:
    return estimate(MODEL, server=SERVER, **more)


def test_a_step_takes_what_the_run_took_and_all_work_is_scaled_alike() -> None:
    """The GPU is busy all the time, so that everything takes a quarter longer; collectives slow others down less."""
    before = predicted()
    assert before.step_seconds is not None
    found = scale_rates(before.question, MeasuredRun("by hand", step_seconds=1.25 * before.step_seconds))
    assert list(found.scaling.factors.values()) == [pytest.approx(1.25, rel=1e-2)] * 6
    after = predicted(calibration=found.scaling)
    assert after.step_seconds == pytest.approx(1.25 * before.step_seconds, rel=2e-4)
    assert after.speed.source == SCALED
    for part in (StepPart.MATRIX_PRODUCTS, StepPart.ATTENTION, StepPart.OPTIMIZER):
        assert after.speed.time.parts[part] == pytest.approx(1.25 * before.speed.time.parts[part], rel=1e-2)
    name, datasheet, scaled, factor = found.changes[0]
    assert (name, scaled / datasheet) == ("matrix_products", pytest.approx(factor, rel=2e-2))
    two = [predicted(nodes=2, calibration=one).step_seconds for one in (None, found.scaling)]
    assert two[1] == pytest.approx(1.25 * two[0], rel=1e-2)  # type: ignore[operator]


def test_tokens_per_second_are_a_gpus_or_all_gpus() -> None:
    asked = predicted().question
    each, total = (scale_rates(asked, read_run(f"{count}tok/s", None, is_all))
                   for count, is_all in ((5762, False), (8 * 5762, True)))  # fmt: skip
    assert each.measured_step_seconds == total.measured_step_seconds == pytest.approx(4096 / 5762)
    assert each.scaling.factors == total.scaling.factors
    assert "times the GPU's peak with this setup; --total" in message_of(
        lambda: scale_rates(asked, read_run(f"{8 * 5762}tok/s"))
    )


def test_each_class_of_a_trace_has_its_own_factor(tmp_path: Path) -> None:
    """A trace is written with classes that take known times as long as predicted; they are found again."""
    asked = predicted().question
    known = {"matrix_products": 1.3, "attention": 0.8, "other_operators": 1.5, "optimizer": 1.1, "communication": 2.0}
    by_hand = Scaling(
        measured_on="", source="", factors=known, gpu="H100-SXM",
        datasheet_flops_per_second=scale_rates(asked, read_run("1s")).scaling.datasheet_flops_per_second,
    )  # fmt: skip
    names = {"matrix_products": "nvjet", "attention": "flash_fwd", "optimizer": "multi_tensor_apply_kernel",
             "communication": "ncclDevKernel", "other_operators": "elementwise"}  # fmt: skip
    speeds = [speed(asked.simulated, asked.hardware, one, with_spans=True) for one in (None, by_hand)]
    seconds = {kind: took for kind, _, took, _ in ScaledRates(by_hand, 0.0, *speeds, ()).changes}
    at, events = 0.0, []
    for kind, took in seconds.items():
        if kind in names:
            events.append(kernel(names[kind], at, 2e6 * took))
            at += 2e6 * took
    found = scale_rates(asked, read_run(trace(tmp_path / "t.json", [*STEPS, *events])))
    assert {kind: pytest.approx(factor, rel=5e-3) for kind, factor in known.items()} == found.scaling.factors


def test_gaps_of_a_trace_are_the_hosts(tmp_path: Path) -> None:
    """A small model, whose GPU waits: the step takes as long as the trace's with a slower host."""
    asked = estimate("gpt2", gpu="H100-SXM").question
    before = estimate("gpt2", gpu="H100-SXM").step_seconds or 0.0
    events = [kernel("elementwise", 0, 100), kernel("elementwise", 2 * 2e6 * before - 100, 100)]
    found = scale_rates(asked, read_run(trace(tmp_path / "t.json", [*STEPS, *events])))
    assert found.after.time.step_seconds == pytest.approx(2 * before, rel=1e-3)
    assert found.scaling.launch_seconds is not None
    assert found.scaling.launch_seconds > LAUNCH_SECONDS
    assert found.scaling.hook_seconds["fsdp1"] / HOOK_SECONDS == pytest.approx(
        found.scaling.launch_seconds / LAUNCH_SECONDS
    )


def test_a_hosts_own_times_leave_the_gpus_rates_and_the_range() -> None:
    host = Scaling(measured_on="2026-11-27", source="by hand", launch_seconds=50e-6)
    (before, after), (alone, slow) = (
        (estimate(model, server=SERVER), estimate(model, server=SERVER, calibration=host)) for model in (MODEL, "gpt2")
    )
    assert after.speed.source == WITH_OWN_HOST
    assert after.speed.range.fastest == before.speed.range.fastest
    assert after.speed.range.slowest == pytest.approx(before.speed.range.slowest, rel=1e-3)  # CUDA: by products' part
    products = StepPart.MATRIX_PRODUCTS
    assert after.speed.time.parts[products] == pytest.approx(before.speed.time.parts[products], rel=1e-2)
    assert (slow.step_seconds or 0) > 2 * (alone.step_seconds or 1)


def test_the_range_is_that_of_published_runs_predicted_with_another_of_their_publisher() -> None:
    run = scale_rates(predicted().question, read_run("0.5s")).scaling
    errors = prediction_errors().own_run
    for more, kind in (({}, "one node"), ({"nodes": 2}, "otherwise"), ({"compile": True}, "otherwise")):
        span = predicted(calibration=run, **more).speed.range
        assert span is not None
        assert span.slowest * (1 + errors[kind].highest) == pytest.approx(1)  # type: ignore[index]
        assert span.fastest * (1 + errors[kind].lowest) == pytest.approx(1)  # type: ignore[index]
    many = replace(run, num_nodes=4)
    assert "alike, on several nodes" in predicted(calibration=many, nodes=2).speed.range.because  # type: ignore[union-attr]
    other = replace(run, precision="fp32, float8 none")
    assert predicted(calibration=other).speed.range is None


def test_another_gpu_or_other_rates_of_it_are_refused() -> None:
    run = scale_rates(predicted().question, read_run("0.5s")).scaling
    assert "of a run on H100-SXM, this is A100-SXM-40GB" in message_of(
        lambda: estimate(MODEL, server="p4d.24xlarge", calibration=run).step_seconds
    )
    assert "with other rates; give the same --cuda" in message_of(
        lambda: predicted(calibration=run, cuda="12.1").step_seconds
    )


def test_the_commands_take_the_file_and_say_where_the_rates_come_from(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    out = stdout_of("calibrate", "--from", "5,762tok/s", *RUN, "--out", path)
    assert "a step took 710.9 ms; predicted " in out
    assert "matrix products" in out
    assert "all work of the GPU and its links is scaled alike" in " ".join(out.split())
    found = read_calibration(path)
    assert isinstance(found, Scaling)
    assert (found.gpu, found.source) == ("H100-SXM", "5,762 tokens/s per GPU")
    document = json_of("predict", *RUN, "--calibration", path)
    assert document["time"]["rates"] == SCALED
    assert document["time"]["step_seconds"] == pytest.approx(4096 / 5762, rel=2e-4)
    text = " ".join(stdout_of("predict", *RUN, "--calibration", path).split())
    assert "rates: datasheet rates scaled by a run: 5,762 tokens/s per GPU" in text
    sizes = stdout_of("max-size", "--server", SERVER, "--strategy", "zero3", "--calibration", path)
    assert SCALED in " ".join(sizes.split())
    words = ("plan", "--model", MODEL, "--tokens", "1T", "--nodes", 4, "--strategy", "zero3", "--batch", 1)
    plans = [json_of(*words, "--server", SERVER, *more, tells_progress=True)["winner"]["tokens_per_second_per_gpu"]
             for more in ((), ("--calibration", path))]  # fmt: skip
    assert plans[0] / plans[1] == pytest.approx(found.factors["matrix_products"], rel=2e-2)
    assert "which no server that is looked at has" in refused(*words, "--server", "p4d.24xlarge", "--calibration", path)
    setting = {"servers": SERVER, "nodes": [4], "strategy": "zero3", "micro_batch_size": 1}
    winner = plan_training(MODEL, "1T", calibration=path, **setting).winner
    assert winner is not None
    assert winner.prediction.speed.source == SCALED
    both = json_of(*words, "--server", f"{SERVER},p4d.24xlarge", "--calibration", path, tells_progress=True)
    assert [one["server"] for one in both["left_out"]] == ["p4d.24xlarge"]
    assert "its GPU is A100-SXM-40GB, and the calibration is of a run on H100-SXM" in both["left_out"][0]["reason"]
    assert "for --time alone" in refused("rehearse", "--calibration", path, "--gpu", "H100-SXM", "--", "python", "x.py")
    (tmp_path / "x.py").touch()
    other = ("rehearse", "--time", "--calibration", path, "--gpu", "A100-SXM-40GB", "--", "python", "x.py")
    assert "of a run on H100-SXM, this is A100" in refused(*other, cwd=tmp_path)
    assert "no machine's rates: 5,762 tokens/s" in message_of(lambda: read_profile(path))


def test_a_file_states_the_setup_and_the_command_line_overrides_it(tmp_path: Path) -> None:
    run, path = tmp_path / "run.toml", tmp_path / "mine.toml"
    run.write_text(f'model = "{MODEL}"\nserver = "{SERVER}"\nnodes = 2\ncompile = true\nstep_seconds = 0.8\n')
    found = json_of("calibrate", "--from", run, "--out", path, "--api", "fsdp2")
    assert found["step_seconds"]["after"] == pytest.approx(0.8, rel=2e-4)
    assert found["calibration"]["is_compiled"]
    assert "16 ranks" in found["calibration"]["setup"]
    assert "FULL_SHARD under fsdp2" in found["calibration"]["setup"]
    assert read_calibration(path).num_nodes == 2  # type: ignore[union-attr]
    run.write_text("step_seconds = 0.8\nmodle = 'gpt2'\n")
    assert "'modle' is no option of the setup (did you mean 'model'?)" in refused("calibrate", "--from", run)
    run.write_text(f'step_seconds = 0.8\nmodel = "{MODEL}"\nserver = "{SERVER}"\nnodes = "1,2"\n')
    assert "nodes: '1,2' is several values; a run has one" in refused("calibrate", "--from", run)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "gpt2"), "--model: it belongs to --from RUN"),
        (("--from", "1s", "--ranks", 2, *RUN), "--ranks: --from is of a run"),
        (("--from", "1s", "--model", "gpt2"), "no GPU is named"),
        (("--from", "1s", "--model", MODEL, "--gpu", "H100-SXM", "--world-size", 8), "has no predicted time"),
        (("--from", "900s", *RUN), "is this the run's setup?"),
    ],
)
def test_what_does_not_fit_together_is_one_line(words: tuple[object, ...], said: str, tmp_path: Path) -> None:
    assert said in refused("calibrate", *words, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_calibration_by_a_run_is_written_and_read(tmp_path: Path) -> None:
    scaling = scale_rates(predicted().question, read_run("0.5s")).scaling
    write_profile(scaling, tmp_path / "a.toml")
    assert read_calibration(tmp_path / "a.toml") == scaling
    assert json.loads(json.dumps(scaling.factors)) == scaling.factors
    (tmp_path / "b.toml").write_text('source = "x"\nmeasured_on = "y"\n')
    assert "rates scaled by a run have some" in message_of(lambda: read_calibration(tmp_path / "b.toml"))
    (tmp_path / "b.toml").write_text((tmp_path / "a.toml").read_text().replace("attention =", "atention ="))
    assert "factors: 'atention' is not allowed; one of matrix_products" in message_of(
        lambda: read_calibration(tmp_path / "b.toml")
    )
