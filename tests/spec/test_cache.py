"""The cache folder: where it is, and when code in it may run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_bench.spec.cache import cache_folder, private_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fsdp-bench"


@pytest.mark.parametrize("given", ["", "relative"])
def test_a_variable_that_is_no_absolute_path_does_not_count(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG base directory specification has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_folder() == Path("/home/ada/.cache/fsdp-bench")


def test_a_new_folder_is_the_users_alone(cache: Path) -> None:
    assert private_folder("code") == cache / "code"
    assert (cache / "code").stat().st_mode & 0o777 == 0o700


def test_a_folder_keeps_its_files_if_nobody_else_may_write(cache: Path) -> None:
    (cache / "code").mkdir(parents=True, mode=0o755)
    (cache / "code" / "file").touch()
    assert private_folder("code") == cache / "code"
    assert (cache / "code" / "file").exists()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_could_write_to_is_emptied(cache: Path, mode: int) -> None:
    (cache / "code").mkdir(parents=True)
    (cache / "code" / "forged").touch()
    (cache / "code").chmod(mode)
    cache.chmod(mode)
    assert private_folder("code") == cache / "code"
    assert not list((cache / "code").iterdir())
    assert cache.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("theirs", ["the cache", "the folder in it"])
def test_a_folder_of_another_user_is_not_taken(theirs: str, cache: Path) -> None:
    (cache / "code").mkdir(parents=True)
    os.chown(cache if theirs == "the cache" else cache / "code", 12345, 12345)
    assert private_folder("code") is None


@pytest.mark.parametrize("broken", ["a file", "a link to nothing"])
def test_a_cache_that_is_no_folder_is_done_without(broken: str, cache: Path) -> None:
    if broken == "a file":
        cache.touch()
    else:
        cache.mkdir()
        (cache / "code").symlink_to("/nowhere/at/all")
    assert private_folder("code") is None


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert cache_folder() is None
    assert private_folder("code") is None
