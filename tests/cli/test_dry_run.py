"""``fsdp-bench dry-run``: what it prints, whether a setup fits, and that nothing is ignored."""

from pathlib import Path

from fsdp_bench.catalog.ladder import nearest_size
from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.dry_run import DryRun, dry_run_document
from fsdp_bench.report.html import write
from fsdp_bench.report.text.dry_run import side_by_side, verdict_line
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import CATEGORIES, DryRunResult, DryRunSpec, MemoryAtStart, UserModule
from tests.conftest import json_of, run_command
from tests.report.html.samples import ParsedPage

GIB = 2**30
A100 = Hardware.of_gpu(BUILT_IN.gpu("A100-SXM-80GB"))
USERS = ("--module", "tests.simulate.recorded.users:own_batch")
NUM_PARAMETERS = 6 * (32 * 32 + 32)
"""Its six linear layers."""


def test_json_has_the_names_of_the_prediction_and_adds_up() -> None:
    document = json_of("dry-run", "--params", "10M", "--world-size", 8, "--seq", 64, tells_progress=True)
    memory = document["memory"]
    assert document["source"] == "dry-run"
    assert document["device"] == "fake"
    assert document["setup"]["world_size"] == document["setup"]["shard_size"] == 8
    assert set(memory["phases"]) == {"forward", "loss", "backward", "optimizer"}
    assert set(memory["breakdown_bytes"]) == set(CATEGORIES)
    assert sum(memory["breakdown_bytes"].values()) == memory["peak_allocated_bytes"]
    assert memory["phases"][memory["peak_phase"]] == memory["peak_allocated_bytes"]


def test_its_page_says_what_ran_on_what_and_what_was_predicted(tmp_path: Path) -> None:
    words = ["--params", "10M", "--server", "p5.48xlarge", "--seq", 64, "--strategy", "SHARD_GRAD_OP"]
    (tmp_path / "dry.json").write_text(run_command("dry-run", *words, "--json").stdout)
    assert run_command("report", "dry.json", "--html", "dry.html", cwd=tmp_path).returncode == 0
    page = (tmp_path / "dry.html").read_text()
    assert "on p5.48xlarge (8 x H100-SXM)" in page
    assert "Fits (predicted): needs" in page  # the verdict is about reserved memory, which no dry run has
    assert "Peak of each phase, on one GPU (dry run)" in page
    assert "SHARD_GRAD_OP under fsdp1, 8 ranks, batch 1 x 64 tokens, bf16-mixed" in page
    assert "GiB of each GPU kept free, for CUDA and NCCL (an assumption" in page


def test_the_trace_has_every_change(tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    words = ("--params", "10M", "--world-size", 2, "--seq", 64, "--api", "fsdp2", "--precision", "fp32")
    assert run_command("dry-run", *words, "--trace", trace).returncode == 0
    lines = trace.read_text().splitlines()
    assert "== backward" in lines
    assert any("aten::_scaled_dot_product" in line for line in lines)


def test_a_users_module_is_run_with_its_blocks_as_units() -> None:
    words = ("--transformer-block", "torch.nn:Linear", "--world-size", 4)
    document = json_of("dry-run", *USERS, *words, tells_progress=True)
    assert document["model"]["num_parameters"] == NUM_PARAMETERS
    assert document["memory"]["resident"]["parameters_bytes"] == 4 * NUM_PARAMETERS / 4


def test_a_plain_module_under_ddp_holds_parameters_gradients_and_one_bucket() -> None:
    """In fp32; SGD's foreach step needs nothing more."""
    words = ("--wrap", "none", "--api", "fsdp2", "--strategy", "ddp", "--optimizer", "sgd", "--world-size", 2)
    document = json_of("dry-run", *USERS, *words, tells_progress=True)
    assert document["memory"]["phases"]["optimizer"] == 3 * 4 * NUM_PARAMETERS


# -- whether a setup fits, of results made by hand ---------------------------------------------------------------------


def result(peak_bytes: int, **more: object) -> DryRunResult:
    return DryRunResult(
        peak_allocated_bytes=peak_bytes,
        peak_phase="backward",
        phases={"backward": peak_bytes},
        load_bytes=0,
        resident=MemoryAtStart(parameters_bytes=0, optimizer_state_bytes=0, gradients_bytes=0, other_bytes=0),
        breakdown_bytes=dict.fromkeys(CATEGORIES, 0) | {"temporary": peak_bytes},
        num_parameters=1,
        kernels="cuda",
        torch="2.13.0",
        seconds=1.0,
        **more,
    )


def of_a_module(peak_bytes: int, **more: object) -> DryRun:
    user = UserModule(function="mine:build", block="mine:Block")
    spec = DryRunSpec(module=user, setup=TrainSetup(world_size=8))
    return DryRun(spec, result(peak_bytes, **more), A100)


def test_live_bytes_show_that_a_users_module_does_not_fit_but_not_that_it_does() -> None:
    large, small = of_a_module(217 * GIB), of_a_module(20 * GIB)
    assert dry_run_document(large)["verdict"] == "does_not_fit"
    assert verdict_line(large).startswith("does not fit (dry run): live bytes alone peak at 217.0 GiB of 79.")
    found = dry_run_document(small)
    assert found["verdict"] is found["fits"] is found["headroom_bytes"] is None
    assert found["required_headroom_bytes"] == 2 * GIB
    assert verdict_line(small).startswith("unknown whether it fits (dry run): live bytes peak at 20.0 GiB of 79.")


def test_the_page_of_a_dry_run_says_what_ran(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(to_json(dry_run_document(of_a_module(217 * GIB))))
    write(tmp_path / "run.json", tmp_path / "run.html")
    text = ParsedPage((tmp_path / "run.html").read_text()).text
    answer = "Does not fit (dry run): needs 217.0 GiB"
    for said in (answer, "2.0 GiB of each GPU", "The peak is in backward.", "own FSDP"):
        assert said in text
    assert "(predicted)" not in text


def test_a_record_of_a_module_holds_no_value_that_was_not_used() -> None:
    setup = dry_run_document(of_a_module(GIB, arguments={"micro_batch_size": 3}))["setup"]
    assert (setup["micro_batch_size"], setup["sequence_length"], setup["loss"]) == (3, None, None)


def of_a_model(peak_bytes: int, where: Hardware | None = A100, api: Api = Api.FSDP1) -> DryRun:
    setup = TrainSetup(world_size=8, sequence_length=512, api=api)
    return DryRun(DryRunSpec(model=nearest_size(Family.LLAMA, 100_000_000), setup=setup), result(peak_bytes), where)


def test_the_reserved_memory_of_a_benchmark_model_is_predicted_and_says_so() -> None:
    found, without = dry_run_document(of_a_model(GIB)), dry_run_document(of_a_model(GIB, None))
    assert found["memory"]["peak_reserved_bytes"] > 0
    assert found["memory"]["peak_reserved_source"] == "predicted"
    assert (found["fits"], found["verdict"]) == (True, "fits")
    assert without["memory"]["peak_reserved_bytes"] is without["fits"] is None


def test_a_table_begins_with_its_conclusion() -> None:
    fitting = [of_a_model(3 * GIB), of_a_model(2 * GIB, api=Api.FSDP2)]
    first, *lines = side_by_side(fitting).splitlines()
    row = next(line for line in lines if "fsdp2" in line)
    assert row.split()[:3] == ["fsdp2", "2.0", "GiB"]
    assert lines.index(row) < next(place for place, line in enumerate(lines) if "fsdp1" in line)
    assert first.startswith("of the 2 that fit, FULL_SHARD, fsdp2 has the lowest peak: 2.0 GiB allocated")
    none = side_by_side([of_a_model(90 * GIB, api=api) for api in Api]).splitlines()[0]
    assert none == "none of 2 fits; FULL_SHARD, fsdp1 is nearest: 90.0 GiB allocated (dry run)"


def test_several_strategies_run_at_once_and_none_that_fits_is_exit_code_3() -> None:
    words = ("--params", "10M", "--seq", 64, "--world-size", 4, "--strategy", "zero3,ddp", "--gpu", "A10G")
    limits = ("--gpu-memory", "100MiB", "--headroom", "80MiB")
    found = json_of("dry-run", *words, *limits, code=3, tells_progress=True)["dry_runs"]
    assert [one["setup"]["strategy"] for one in found] == ["FULL_SHARD", "NO_SHARD"]
    assert {one["verdict"] for one in found} == {"does_not_fit"}
