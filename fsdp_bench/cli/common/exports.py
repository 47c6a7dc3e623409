"""The options ``--export`` and ``--export-dir``: the chosen setting as files that train it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_bench.cli.common.options import FILE, SetupOptions, taken_together
from fsdp_bench.cli.common.setups import config_to_export
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.report.terminal import print_line, print_lines
from fsdp_bench.spec.errors import SpecError, UserError

if TYPE_CHECKING:
    from fsdp_bench.plan.purchase.offer import SettingOffer


@dataclass(frozen=True)
class Export:
    """The kinds of files to write for an answer, and the folder for them."""

    kinds: tuple[str, ...]
    folder: Path

    def document(self, answer: Prediction | SettingOffer | None, options: SetupOptions) -> dict[str, Any]:
        """Write the files and return their JSON form, with the error where there is one: the answer is not lost."""
        try:
            written, refused = self._write(answer, options)
        except UserError as error:
            return {"exports": [], "error": str(error)}
        return {"exports": written, **({"error": _joined(refused)} if refused else {})}

    def print(self, answer: Prediction | SettingOffer | None, options: SetupOptions) -> None:
        """Write files; print which, and how to start them. Raises SpecError for what was refused, at the end."""
        from fsdp_bench.report.text.common import exports_text

        written, refused = self._write(answer, options)
        if written:
            print_lines(exports_text(written, self.folder))
        elif not refused:
            print_line(f"nothing exported: {'there is no plan' if answer is None else 'it does not fit'}")
        if refused:
            raise SpecError(_joined(refused))

    def _write(
        self, answer: Prediction | SettingOffer | None, options: SetupOptions
    ) -> tuple[list[Mapping[str, Any]], list[SpecError]]:
        """Write the files of an answer that fits; return their JSON forms, and the error of each kind that has none.

        Raises SpecError, and writes nothing, for what cannot be exported at all, and files that are there and differ.
        """
        from fsdp_bench.plan.export.chosen import chosen_by_offer, chosen_by_prediction
        from fsdp_bench.plan.export.export import document, export_each, refuse_model
        from fsdp_bench.plan.export.files import write

        if answer is None or (isinstance(answer, Prediction) and answer.fits is False):
            return [], []
        model = answer.question.model if isinstance(answer, Prediction) else answer.goal.model
        refuse_model(model)
        command = shlex.join(["fsdp-bench", *(click.get_current_context().find_root().obj or ())])
        given = config_to_export(options, model), command
        if isinstance(answer, Prediction):
            chosen = chosen_by_prediction(answer, *given)
        else:
            chosen = chosen_by_offer(answer, *given)
        files, refused = export_each(self.kinds, chosen)
        return document(files, write(files, self.folder)), refused


def _joined(refused: Sequence[SpecError]) -> str:
    return "; ".join(map(str, refused))


def _read(export: Sequence[str], export_dir: Path | None) -> Export | None:
    if not export:
        if export_dir is not None:
            raise SpecError("export-dir: goes with --export, which says what is written there")
        return None
    from fsdp_bench.plan.export.export import read_kinds

    if export_dir is not None and export_dir.exists() and not export_dir.is_dir():
        raise SpecError(f"export-dir: {str(export_dir)!r} is no folder")
    return Export(read_kinds(export), export_dir or Path())


export_options = taken_together(
    "export",
    _read,
    [
        click.option(
            "--export",
            multiple=True,
            metavar="KIND",
            help="Write files that train it: pytorch, accelerate, huggingface, torchtitan, slurm. Several by comma.",
        ),
        click.option("--export-dir", type=FILE, metavar="DIR", help="Where to.  [default: the current folder]"),
    ],
)
"""Adds the options to a command, which gets them as ``export``: an Export, or None."""
