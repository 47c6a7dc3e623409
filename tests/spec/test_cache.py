"""The cache folder: where it is, and when code in it may run."""

import os
from pathlib import Path

import pytest

from fsdp_bench.spec.files import cache_folder, private_folder


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


@pytest.mark.parametrize("mask", [0o022, 0o002])
def test_a_new_folder_is_the_users_alone_whatever_the_umask(mask: int, cache: Path) -> None:
    before = os.umask(mask)
    try:
        assert private_folder("code") == cache / "code"
    finally:
        os.umask(before)
    assert (cache / "code").stat().st_mode & 0o777 == 0o700


def test_a_folder_keeps_its_files_if_nobody_else_may_write(cache: Path) -> None:
    (cache / "code").mkdir(parents=True, mode=0o755)
    (cache / "code" / "file").touch()
    assert private_folder("code") == cache / "code"
    assert (cache / "code" / "file").exists()


@pytest.mark.parametrize("writable", ["the cache", "the folder in it"])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_may_write_to_is_left_as_it_is_and_not_used(mode: int, writable: str, cache: Path) -> None:
    """A group that shares a cache shares it on purpose: the private folder is beside it."""
    (cache / "code").mkdir(parents=True, mode=0o700)
    (cache / "code" / "forged").touch()
    shared = cache if writable == "the cache" else cache / "code"
    shared.chmod(mode)
    found = private_folder("code")
    assert found == cache.with_name(f"fsdp-bench-{os.geteuid()}") / "code"
    assert not list(found.iterdir())
    assert {folder.stat().st_mode & 0o777 for folder in (found, found.parent)} == {0o700}
    assert shared.stat().st_mode & 0o777 == mode
    assert [path.name for path in (cache / "code").iterdir()] == ["forged"]
    assert private_folder("code") == found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("theirs", ["the cache", "the folder in it"])
def test_a_folder_of_another_user_is_not_taken(theirs: str, cache: Path) -> None:
    (cache / "code").mkdir(parents=True)
    os.chown(cache if theirs == "the cache" else cache / "code", 12345, 12345)
    own = cache.with_name(f"fsdp-bench-{os.geteuid()}")
    assert private_folder("code") == own / "code"
    own.chmod(0o777)
    assert private_folder("code") is None


@pytest.mark.parametrize("broken", ["a file", "a link to nothing"])
def test_a_cache_that_is_no_folder_is_done_without(broken: str, cache: Path) -> None:
    for place in (cache, cache.with_name(f"fsdp-bench-{os.geteuid()}")):
        if broken == "a file":
            place.touch()
        else:
            place.mkdir()
            (place / "code").symlink_to("/nowhere/at/all")
    assert private_folder("code") is None


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert cache_folder() is None
    assert private_folder("code") is None
