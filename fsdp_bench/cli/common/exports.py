"""The options ``--export`` and ``--export-dir``: the chosen setting as files that train it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_bench.cli.common.options import SetupOptions
from fsdp_bench.cli.common.setups import config_to_export
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.report.terminal import print_line, print_lines
from fsdp_bench.spec.errors import SpecError, UserError

if TYPE_CHECKING:
    from fsdp_bench.plan.purchase.offer import Offer


@dataclass(frozen=True)
class ExportOptions:
    """The kinds of files to write, and the folder for them."""

    kinds: tuple[str, ...]
    folder: Path


def export_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options; the command gets ``export`` and ``export_dir``."""
    command = click.option(
        "--export-dir", type=click.Path(path_type=Path), metavar="DIR", help="Where to.  [default: the current folder]"
    )(command)
    return click.option(
        "--export",
        multiple=True,
        metavar="KIND",
        help="Write files that train it: pytorch, accelerate, huggingface, torchtitan, slurm. Several by comma.",
    )(command)


def read_export_options(export: Sequence[str], folder: Path | None) -> ExportOptions | None:
    """Read the options; None if nothing is to be exported.

    Raises:
        SpecError: for an unknown kind, and a folder that is a file.
    """
    if not export:
        if folder is not None:
            raise SpecError("export-dir: goes with --export, which says what is written there")
        return None
    from fsdp_bench.plan.export.export import read_kinds

    if folder is not None and folder.exists() and not folder.is_dir():
        raise SpecError(f"export-dir: {str(folder)!r} is no folder")
    return ExportOptions(read_kinds(export), folder or Path())


class Exporter:
    """Writes the files of an answer; then prints them, or returns their JSON form."""

    def __init__(self, asked: ExportOptions, options: SetupOptions) -> None:
        self._asked, self._options = asked, options

    def write(self, answer: Prediction | Offer | None) -> tuple[list[Mapping[str, Any]], list[SpecError]]:
        """Write the files of an answer; none for no answer, or one that does not fit.

        Returns:
            Their JSON form, and for each kind that cannot express the setting the error that says why.

        Raises:
            SpecError: for what cannot be exported at all, and files that are there and differ. Then nothing is written.
        """
        from fsdp_bench.plan.export.chosen import chosen_by_offer, chosen_by_prediction
        from fsdp_bench.plan.export.export import document, export_each, refuse_model
        from fsdp_bench.plan.export.files import write

        if answer is None or (isinstance(answer, Prediction) and answer.fits is False):
            return [], []
        model = answer.question.model if isinstance(answer, Prediction) else answer.goal.model
        refuse_model(model)
        given = config_to_export(self._options, model), _command()
        if isinstance(answer, Prediction):
            chosen = chosen_by_prediction(answer, *given)
        else:
            chosen = chosen_by_offer(answer, *given)
        files, refused = export_each(self._asked.kinds, chosen)
        return document(files, write(files, self._asked.folder)), refused

    def document(self, answer: Prediction | Offer | None) -> dict[str, Any]:
        """Write the files and return their JSON form, with the error where there is one: the answer is not lost."""
        try:
            written, refused = self.write(answer)
        except UserError as error:
            return {"exports": [], "error": str(error)}
        return {"exports": written, **({"error": _joined(refused)} if refused else {})}

    def print(self, answer: Prediction | Offer | None) -> None:
        """Write the files, and print which and how to start them.

        Raises:
            SpecError: for what was refused, behind all others.
        """
        from fsdp_bench.report.text.common import exports_text

        written, refused = self.write(answer)
        if written:
            print_lines(exports_text(written, self._asked.folder))
        elif not refused:
            print_line(f"nothing exported: {'there is no plan' if answer is None else 'it does not fit'}")
        if refused:
            raise SpecError(_joined(refused))


def _joined(refused: Sequence[SpecError]) -> str:
    return "; ".join(map(str, refused))


def _command() -> str:
    """Return the running command as the user wrote it."""
    words = click.get_current_context().find_root().obj or ()
    return shlex.join(["fsdp-bench", *words])
