"""check(): a file's recipes against their baseline. Rehearsals are replaced by answers that are written here."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from fsdp_bench.plan import check as checking
from fsdp_bench.plan.check import CheckResult, check
from fsdp_bench.plan.compare.scripts import Status
from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.plan.script.variants import Variant
from fsdp_bench.report.text.check import answer, check_text
from fsdp_bench.spec.errors import ExitCode, SpecError
from fsdp_bench.spec.units import GIB
from tests.conftest import run_command
from tests.plan.compare.test_scripts import CRASHED, UNKNOWN, UP, held, line, script
from tests.report.test_rehearsal_text import OUT

Found = Rehearsal | str
PYTHON = sys.executable


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes a file of recipes, with what is found when each is rehearsed."""

    def write(text: str = "", **found: Found) -> Path:
        class Instead:
            def __init__(self, _kept: object) -> None: ...

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_error: object) -> None: ...

            def answer(self, variants: Sequence[Variant], progress: Callable[[Answered], None]) -> None:
                for variant in variants:
                    name = variant.command[-1]
                    one = found[name]
                    progress(Answered(variant, (), one) if isinstance(one, str) else Answered(variant, (one,)))

        monkeypatch.setattr(checking, "Rehearsals", Instead)
        (tmp_path / "train.py").touch()
        path = tmp_path / "recipes.toml"
        tables = [f'[recipes.{name}]\ncommand = "{PYTHON} train.py {name}"\ngpu = "H100-SXM"\n' for name in found]
        path.write_text(text or "\n".join(tables))
        return path

    return write


def small(**changes: Any) -> Rehearsal:
    return script(held(line(58, UP), 3 * GIB), **changes)


def grown() -> Rehearsal:
    return script(held(line(61, UP), 5 * GIB), gib=24, reserved=32)


def statuses(found: CheckResult) -> dict[str, Status]:
    return {row.name: row.status for row in found.rows}


def test_a_recipe_that_grew_fails_with_the_line_that_grew(file: Callable[..., Path]) -> None:
    path = file(small=small(), same=small())
    first = check(path)
    assert statuses(first) == {"small": Status.NEW, "same": Status.NEW}
    assert first.exit_code is ExitCode.DONE
    assert not path.with_name("recipes.baseline.json").exists()
    assert "No baseline of: small, same." in check_text(first)
    assert check(path, update=True).exit_code is ExitCode.DONE
    assert answer(check(path)) == "2 recipes checked: all pass"

    found = check(file(small=grown(), same=small()))
    assert statuses(found) == {"small": Status.GREW, "same": Status.PASSES}
    assert found.exit_code is ExitCode.DOES_NOT_FIT
    why = "peak +2.0 GiB allocated, +2.0 GiB reserved, model.py:61 +2.0 GiB; limit 1%"
    assert answer(found) == f"1 of 2 recipes failed: small: grew: {why}"
    text = check_text(found)
    assert f"| small | 1 x p5.48xlarge (8 x H100-SXM) | **grew** | 32.0 GiB | +2.0 GiB | {why} |" in text
    assert f"- model.py:61 +2.0 GiB: `{UP}`" in text
    assert check(path, update=True).exit_code is ExitCode.DONE
    assert check(path).exit_code is ExitCode.DONE


def test_each_kind_of_failure_is_a_row_and_a_crash_decides_the_exit_code(file: Callable[..., Path]) -> None:
    check(file(large=small(), none=small(), crash=small(), lost=small()), update=True)
    found = check(
        file(large=small(**OUT), none=small(**UNKNOWN), crash=small(**CRASHED), lost="killed <by> | signal 9")
    )
    assert list(statuses(found).values()) == [Status.DOES_NOT_FIT, Status.UNKNOWN, Status.CRASHED, Status.CRASHED]
    assert found.exit_code is ExitCode.CRASHED
    assert answer(found).startswith("4 of 4 recipes failed: crash: crashed: failed with KeyError at train.py:17")
    text = check_text(found)
    assert "| lost |  | **crashed** |  |  | killed &lt;by> \\| signal 9 |" in text
    assert f"- model.py:58 3.0 GiB: `{UP}`" in text  # where the memory is that ran out
    assert check(file(large=small(**OUT), none=small())).exit_code is ExitCode.DOES_NOT_FIT


def test_the_baseline_keeps_a_recipe_that_crashes_and_drops_one_that_is_gone(file: Callable[..., Path]) -> None:
    check(file(a=small(), b=small(), gone=small()), update=True)
    assert "In the baseline alone: gone." in check_text(check(file(a=small(), b=small())))
    path = file(a=grown(), b=small(**CRASHED))
    assert check(path, update=True).exit_code is ExitCode.CRASHED
    baseline = json.loads(path.with_name("recipes.baseline.json").read_bytes())["recipes"]
    assert list(baseline) == ["a", "b"]
    assert [one["memory"]["peak_allocated_bytes"] for one in baseline.values()] == [24 * GIB, 22 * GIB]


def test_the_baseline_has_nothing_of_the_machine_that_wrote_it(file: Callable[..., Path], tmp_path: Path) -> None:
    found = script(held(line(58, UP, file=str(tmp_path / "src" / "model.py")), 3 * GIB))
    path = file(a=found)
    check(path, update=True)
    text = path.with_name("recipes.baseline.json").read_text()
    assert '"src/model.py"' in text
    assert str(tmp_path) not in text


def test_one_recipe_with_several_values_is_several_rows(file: Callable[..., Path]) -> None:
    recipe = f'command = "{PYTHON} train.py {{bs}}"\ngpu = ["L4", "A10G"]\neach = {{bs = [1, 2]}}\nlimit = "5GiB"'
    text = f'baseline = "base.json"\n[recipes.x]\n{recipe}\n'
    found = check(file(text, **{"1": small(), "2": grown()}), update=True)
    names = [f"x: gpu {gpu}, bs {bs}" for gpu in ("L4", "A10G") for bs in (1, 2)]
    assert list(statuses(found)) == names
    assert found.updated is not None
    assert found.updated.name == "base.json"
    again = check(file(text, **{"1": grown(), "2": grown()}))
    assert again.exit_code is ExitCode.DONE  # 2 GiB more are within 5


def test_the_command_line_prints_markdown_or_json_and_progress(file: Callable[..., Path]) -> None:
    path = file(a=small(), b=small())
    run_command("check", path, "--update")
    file(a=grown(), b=small())
    done = run_command("check", path)
    assert done.returncode == 3
    assert done.stdout.startswith("### fsdp-bench check: 1 of 2 recipes failed: a: grew: ")
    assert done.stderr.splitlines()[1] == "2 of 2: b: passes: peak allocated as before; limit 1%"
    found = json.loads(run_command("check", path, "--json").stdout)
    assert (found["passes"], [one["status"] for one in found["recipes"]]) == (False, ["grew", "passes"])
    assert found["recipes"][0]["now"]["memory"]["peak_allocated_bytes"] == 24 * GIB


TABLE = f'[recipes.a]\ncommand = "{PYTHON} train.py"\ngpu = "L4"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limits = 1\n" + TABLE, "recipes.toml: unknown field 'limits' (did you mean 'limit'?)"),
        (TABLE + "step = 4", "unknown field 'recipes.a.step' (did you mean 'steps'?)"),
        (TABLE + 'limit = "much"', "[recipes.a] limit: 'much' is not a size"),
        (TABLE + "time = 1", "recipes.a.time: 1 is not allowed; true or false"),
        (TABLE + "steps = 0", "[recipes.a] steps: 0 is not allowed"),
        (TABLE + "each = {bs = [1]}", "[recipes.a] each: {bs} is nowhere in the command"),
        (TABLE + 'server = "p5.48xlarge"', "[recipes.a] server and gpu each name the GPU"),
        ('[recipes.a]\ngpu = "L4"', "recipes.toml: has no `recipes.a.command`"),
        ('[recipes.a]\ncommand = "python nope.py"', "[recipes.a] command: "),
        ("recipes = {}", "has no [recipes.NAME]"),
        ("limit = '1%'", "has no `recipes`"),
        ("[recipes", "is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_place(file: Callable[..., Path], text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        check(file(text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "is no baseline (recipes.baseline.json has no schema_version); --update writes it anew"),
        ('{"schema_version": 2}', "was written by a newer fsdp-bench"),
        ("nothing", "is no baseline"),
    ],
)
def test_a_baseline_that_cannot_be_read_is_said_before_anything_runs(
    file: Callable[..., Path], text: str, said: str
) -> None:
    path = file(a="must not run")
    path.with_name("recipes.baseline.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        check(path)
    assert said in str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nope\.toml: no such file; a TOML file with \[recipes\.NAME\]"):
        check(tmp_path / "nope.toml")
