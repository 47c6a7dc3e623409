"""The rows of the matrix: a framework's releases, and what is rehearsed of each."""

from pathlib import Path

import msgspec

from fsdp_bench.spec.errors import SpecError

ROWS = Path(__file__).parent / "rows"
RECORDS = Path(__file__).parents[2] / "results" / "rehearsed" / "frameworks"
NEWEST_TORCH = "2.13.0"
"""The torch of ``make test-rehearsal``, on which a release runs that names no other."""
GPUS_PER_NODE = 8
SERVER = "p5.48xlarge"


class Release(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One release of a framework."""

    release: str
    requirements: tuple[str, ...] = ()
    """Packages beside those that ``make test-rehearsal`` installs, as pip takes them."""
    torch: str = NEWEST_TORCH


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One example of a framework. Its texts may have {release}, {nodes}, {gpus} and {gpus_per_node}."""

    name: str
    what: str
    command: str = ""
    options: tuple[str, ...] = ()
    """Options of rehearse beside the hardware: what had to be said."""
    repository: str | None = None
    """The repository that has the example, if no wheel has it. It is cloned beside the files, as ``source``."""
    tag: str = ""
    """A tag, branch or commit of it. Empty: the default branch."""
    files: dict[str, str] = {}
    """What a user has in the working folder, by path: configurations."""
    releases: tuple[str, ...] = ()
    """The releases that are rehearsed. Empty: all."""
    gpus: tuple[int, ...] = (8, 64)
    missing: dict[str, str] = {}
    """One line by release: what is missing there, and why. ``all`` stands for every release."""

    def text(self, template: str, release: str, gpus: int) -> str:
        """Return a text of this row for a release and a number of GPUs."""
        each = min(gpus, GPUS_PER_NODE)
        numbers = {"gpus": gpus, "nodes": gpus // each, "gpus_per_node": each}
        for name, value in {"release": release, **numbers}.items():
            template = template.replace(f"{{{name}}}", str(value))
        return template


class Framework(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A framework, its releases (the newest first), and its rows."""

    framework: str
    releases: tuple[Release, ...]
    rows: tuple[Row, ...]
    files: dict[str, str] = {}
    """What a user has in the working folder of each of its rows."""
    file: str = ""
    """The file's name, which it does not say itself."""

    def of_row(self, row: Row) -> list[Release]:
        """Return the releases at which a row is rehearsed."""
        asked = row.releases or [one.release for one in self.releases]
        known = "all" in row.missing
        return [one for one in self.releases if one.release in asked and one.release not in row.missing and not known]


def read_matrix(folder: Path = ROWS) -> list[Framework]:
    """Read all frameworks, by name. Raises SpecError for a file that is no framework, or a row's name given twice."""
    found = list[Framework]()
    for file in sorted(folder.glob("*.toml")):
        try:
            read = msgspec.toml.decode(file.read_bytes(), type=Framework)
        except msgspec.DecodeError as error:
            raise SpecError(f"{file.name}: {error}") from error
        found.append(msgspec.structs.replace(read, file=file.name))
    names = [row.name for one in found for row in one.rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SpecError(f"rows: {', '.join(sorted(twice))} is there twice")
    return sorted(found, key=lambda one: one.framework.lower())
