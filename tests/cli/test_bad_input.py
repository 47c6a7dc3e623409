"""Mistakes of users, downloads and machines: one line that names the mistake, and exit code 2."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.catalog import recorded
from fsdp_bench.cli import main as command_line
from tests.catalog.test_hf_config import LLAMA
from tests.catalog.test_user_file import GPU, SERVER
from tests.conftest import command, refused, run_command, stdout_of

NESTED = "[" * 2000 + "]" * 2000
DIGITS = "9" * 5000
ALL_TOML = (("sweep", "--list"), ("models", "--catalog"), ("predict", "--params", "10M", "--calibration"))
"""Commands that read a TOML file, which they name last."""
ESCAPES = "\x1b]0;title\x07\x1b[2J"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_text(text: str) -> Path:
        path = tmp_path / "file.txt"
        path.write_text(text)
        return path

    return write_text


DEEP, LARGE = "is nested too deeply", "up to 9223372036854775807"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"x = {NESTED}", f"{DEEP}; up to 32 levels"),
        (f"x = {'{a = ' * 2000}1{'}' * 2000}", f"{DEEP}; up to 32 levels"),
        (f"{'a.' * 500}a = 1", f"{DEEP}; up to 32 levels"),
        *((f"[run]\nsteps = {number}\n", LARGE) for number in (DIGITS, "0x" + "f" * 5000, "18446744073709551616")),
        (f'{{"model_type": {"[" * 200_000}', DEEP),
        (json.dumps(LLAMA).replace("4096", DIGITS, 1), LARGE),
    ],
    ids=lambda text: text[:20],
)
def test_deep_nesting_and_many_digits_are_one_line(write: Callable[[str], Path], content: str, said: str) -> None:
    path = write(content)
    for words in (("predict", "--hf-config"),) if content.startswith("{") else ALL_TOML:
        assert said in refused(*words, path)


def test_a_packed_file_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_BYTES", 1 << 20)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    expected = "is no recorded model: it has more than 1 MiB"
    assert expected in refused("predict", "--recorded", "x.json.gz", "--gpu", "H100-SXM", cwd=tmp_path)


def test_a_name_of_many_digits_is_refused_at_once() -> None:
    began = time.process_time()
    assert "(20002 characters) is not in the catalogue" in refused("predict", "--params", "10M", "--gpu", "9" * 20000)
    assert time.process_time() - began < 5  # an expression that tries every beginning takes a minute


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--params", "x", "--json"),
        ("predict", "--json", "--no-such-option"),
        ("predict", "--model", "gpt2", "--batch", "1,2", "--json", "--sort", "step"),
        ("max-size", "--json"),
        ("dry-run", "--json", "--params", "x"),
        ("report", "no-such-folder", "--json"),
        ("validate", "--against", "no-such-folder", "--json"),
        ("servers", "no-such-server", "--json"),
        ("models", "no-such-model", "--json"),
        ("calibrate", "--ranks", "x", "--json"),
    ],
)
def test_with_json_an_error_is_a_json_document_on_standard_output(words: tuple[str, ...]) -> None:
    done = run_command(*words)
    assert (done.returncode, done.stderr) == (2, "")
    (key, message), *more = json.loads(done.stdout).items()
    assert (key, more) == ("error", [])
    assert message
    assert not message.startswith("fsdp-bench")
    assert "--sort" not in words or "--json prints all setups in the order of the options" in message


def test_a_name_in_a_downloaded_config_is_printed_without_its_escapes_and_as_ascii_in_json(
    write: Callable[[str], Path],
) -> None:
    name = f"{ESCAPES}\n[/red]x é 中 😀"
    path = write(json.dumps({**LLAMA, "_name_or_path": name}))
    printed, as_json = stdout_of("predict", "--hf-config", path), stdout_of("predict", "--hf-config", path, "--json")
    assert r"\x1b]0;title\x07\x1b[2J\n[/red]x" in printed
    assert "\x1b" not in printed
    assert as_json.isascii()
    assert "é 中 😀" in json.loads(as_json)["model"]["name"]


def test_a_catalogue_may_replace_a_gpu_under_its_name_in_any_case(write: Callable[[str], Path]) -> None:
    path = write(GPU.replace('name = "RTX-4090"', 'name = "rtx-4090"') + SERVER)
    stdout_of("predict", "--params", "10M", "--server", "basement", "--catalog", path)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        PermissionError(13, "Permission denied", "a\nb"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
)
def test_an_error_of_the_machine_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    raise_in_models(monkeypatch, error)
    refused("models")


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raise_in_models(monkeypatch, ZeroDivisionError("a\x1bb"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shown = run_command("models")
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr  # run_command asks for it
    monkeypatch.setattr(command_line, "TRACEBACK", "FSDP_BENCH_NOT_SET")
    done = run_command("models")
    (path,) = tmp_path.iterdir()
    assert done.returncode == 1
    assert done.stderr.isascii()
    assert done.stderr.startswith(r"fsdp-bench: unexpected ZeroDivisionError: a\x1bb; this is a bug of fsdp-bench")
    assert done.stderr.endswith(f"({path})\n")
    assert "raise_error" in path.read_text()


def raise_in_models(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    from fsdp_bench.cli import models

    def raise_error(*_: object) -> None:
        raise error

    monkeypatch.setattr(models, "load_user_catalog", raise_error)


def test_a_deleted_current_folder_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -P -m fsdp_bench.cli.main report x"
    environment = {**os.environ, "PYTHONPATH": str(Path(command_line.__file__).parents[2])}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == (
        "fsdp-bench: the current folder no longer exists; change to one that does (No such file or directory)\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("models",), "the output cannot be written: No space left on device"),
        (("models", "--json"), "the output cannot be written: No space left on device"),
        (("models", "--seq", "--json"), "No such option '--seq'"),
    ],
)
def test_standard_output_on_a_full_disk_is_one_line(words: tuple[str, ...], said: str) -> None:
    """Long output fails where it is written, short output where the buffer is flushed at the end."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command(*words), stdout=full, stderr=subprocess.PIPE, text=True, env=buffered)
    assert done.returncode == 2
    assert done.stderr == f"fsdp-bench: {said}\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        done = subprocess.run(command("models"), stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_the_letters_of_a_name_shows_their_escapes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "_name_or_path": "é中"}))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(command_line.__file__).parents[2])}
    words = command("predict", "--hf-config", tmp_path / "config.json")
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert r"\xe9\u4e2d" in done.stdout
