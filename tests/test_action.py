"""The GitHub Action: each step's shell runs as on GitHub, with stand-ins for pip, fsdp-bench and gh on the PATH."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
ACTION: dict[str, Any] = YAML(typ="safe").load((ROOT / "action.yml").read_text())

PYTHON = """#!/bin/bash
# stands for a Python: `-m venv FOLDER` makes a folder with programs that note their words
[ "$1 $2" = "-m venv" ] || exit 9
mkdir -p "$3/bin"
printf '#!/bin/bash\\necho "python $*" >> "$CALLS"\\n' > "$3/bin/python"
printf '#!/bin/bash\\necho "fsdp-bench $*" >> "$CALLS"; cat "$ANSWER"; exit "$ANSWER_CODE"\\n' > "$3/bin/fsdp-bench"
chmod +x "$3/bin/python" "$3/bin/fsdp-bench"
"""
GH = """#!/bin/bash
# stands for GitHub's command line: notes its words and the body; answers a question for comments
echo "gh $*" >> "$CALLS"
for word; do case "$word" in body=@*) cat "${word#body=@}" > "$BODY";; esac; done
[ -z "$GH_FAILS" ] || { echo "HTTP 403: Resource not accessible by integration" >&2; exit 1; }
case "$*" in *--paginate*) printf '%s' "$COMMENTS";; esac
"""
GREW = "### fsdp-bench check: 1 of 2 recipes failed: a: grew: peak +2.1 GiB allocated, model.py:61 +1.8 GiB\n"


@dataclass
class Ran:
    """The job: the exit code of its last step, and what the steps wrote."""

    code: int
    calls: list[str]
    output: str
    summary: str
    body: str


def job(folder: Path, answer: str = GREW, code: int = 3, event: str = "pull_request", **changes: str) -> Ran:
    """Run the action's steps in an empty repository, as GitHub does: until one fails."""
    programs, repository = folder / "programs", folder / "repository"
    programs.mkdir()
    repository.mkdir()
    for name, text in {"python3": PYTHON, "gh": GH}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    files = {name: folder / name for name in ("CALLS", "BODY", "ANSWER", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for file in files.values():
        file.touch()
    files["ANSWER"].write_text(answer)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        **{name: str(file) for name, file in files.items()},
        **{"RUNNER_TEMP": str(folder / "temp"), "GITHUB_REPOSITORY": "me/project", "ANSWER_CODE": str(code)},
        **{"COMMENTS": "", "GH_FAILS": ""},
        **{name: value for name, value in changes.items() if name.isupper()},
    }
    inputs = {name: one["default"] for name, one in ACTION["inputs"].items()} | changes
    values = {f"inputs.{name}": value for name, value in inputs.items()}
    values |= {"github.action_path": "/action", "github.event_name": event, "github.event.pull_request.number": "7"}
    values["github.token"] = "secret"
    (folder / "temp").mkdir()
    output, done = "", 0
    for step in ACTION["runs"]["steps"]:
        known = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
        values |= {f"steps.check.outputs.{name}": value for name, value in known.items()}
        if not holds(step.get("if"), values):
            continue
        own = {name: filled(filled(str(value), values), values) for name, value in step.get("env", {}).items()}
        assert step["shell"] == "bash"
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        ran = subprocess.run(command, cwd=repository, env={**environment, **own}, capture_output=True, text=True)
        output, done = output + ran.stdout + ran.stderr, ran.returncode
        if done:
            break
    assert list(repository.iterdir()) == []
    calls = files["CALLS"].read_text().splitlines()
    return Ran(done, calls, output, files["GITHUB_STEP_SUMMARY"].read_text(), files["BODY"].read_text())


def filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ *([\w.]+) *\}\}", lambda match: values[match[1]], text)


def holds(condition: str | None, values: dict[str, str]) -> bool:
    """Read a condition of equations with && between them."""
    equations = re.findall(r"([\w.]+) == '([^']*)'", condition or "")
    assert len(equations) == (condition or "").count("==")
    return all(values[name] == wanted for name, wanted in equations)


def test_a_recipe_that_grew_fails_the_job_with_a_summary_and_a_comment(tmp_path: Path) -> None:
    found = job(tmp_path)
    temp = tmp_path / "temp"
    assert found.code == 3
    assert found.calls[:2] == ["python -m pip install --quiet --no-compile /action", "fsdp-bench check fsdp-bench.toml"]
    assert found.summary == GREW
    assert found.body == f"<!-- fsdp-bench check fsdp-bench.toml -->\n{GREW}"
    assert found.calls[2].startswith("gh api --paginate repos/me/project/issues/7/comments --jq ")
    posted = f"gh api --silent --method POST repos/me/project/issues/7/comments --field body=@{temp}/comment.md"
    assert found.calls[3:] == [posted]


def test_a_check_that_passes_passes_without_a_comment(tmp_path: Path) -> None:
    found = job(tmp_path, "### fsdp-bench check: 2 recipes checked: all pass\n", code=0)
    assert (found.code, found.summary.count("all pass")) == (0, 1)
    assert [call for call in found.calls if "--method" in call] == []


@pytest.mark.parametrize("code", [0, 3])
def test_an_earlier_comment_is_updated(tmp_path: Path, code: int) -> None:
    found = job(tmp_path, code=code, COMMENTS="41\n42\n")
    assert found.code == code
    (changed,) = (call for call in found.calls if "--method" in call)
    assert changed.startswith("gh api --silent --method PATCH repos/me/project/issues/comments/41 --field body=@")


def test_a_comment_that_is_not_allowed_leaves_the_answer_as_it_is(tmp_path: Path) -> None:
    found = job(tmp_path, GH_FAILS="1")
    assert found.code == 3
    assert "::warning::fsdp-bench check could not comment" in found.output


@pytest.mark.parametrize("changes", [{"event": "push"}, {"comment": "false"}])
def test_there_is_a_comment_only_where_one_is_wanted(tmp_path: Path, changes: dict[str, str]) -> None:
    assert [call for call in job(tmp_path, **changes).calls if call.startswith("gh ")] == []


def test_bad_input_fails_the_job_and_the_summary_says_where_the_reason_is(tmp_path: Path) -> None:
    found = job(tmp_path, "", code=2)
    assert found.code == 2
    assert found.summary == "### fsdp-bench check ended with code 2; the job's log says why\n"


def test_names_and_texts_of_a_repository_are_never_run(tmp_path: Path) -> None:
    file = "a b'; touch pwned; $(touch pwned) \".toml"
    found = job(tmp_path, "$(touch pwned) `touch pwned`\n" * 4000, file=file)
    assert found.calls[1] == f"fsdp-bench check {file}"
    assert re.match(r"<!-- fsdp-bench check [\w./-]+ -->\n\$\(touch", found.body)
    assert len(found.body) < 65536  # GitHub's limit
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"], "values of a pull request reach the shell as variables alone"


def test_the_comment_of_each_file_is_found_by_its_mark(tmp_path: Path) -> None:
    (asked,) = (call for call in job(tmp_path, file="recipes/a.toml").calls if "--paginate" in call)
    mark = json.dumps("<!-- fsdp-bench check recipes/a.toml -->")
    assert asked.endswith(f"--jq .[] | select(.body | startswith({mark})) | .id")
