"""The options that describe a setup; predict, dry-run and max-size share them.

A command uses them like this:

@click.command("predict", cls=SetupCommand)
@setup_options()
def command(options: SetupOptions) -> int:
    readings = read_setups(options)
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import click
from click.core import ParameterSource

from fsdp_bench.cli.common.lists import Values
from fsdp_bench.plan.defaults import DEFAULT_PRECISION, DEFAULT_SEQUENCE_LENGTH
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.field import option_of
from fsdp_bench.spec.setup import FIELDS, OPTIONS, Precision
from fsdp_bench.spec.units import format_count


@dataclass(frozen=True)
class SetupOptions:
    """The options as the user wrote them; None if an option was not given."""

    model: str | None = None
    hf_config: Path | None = None
    recorded: Path | None = None
    code: str | None = None
    attention: str | None = None
    lora: str | None = None
    qlora: str | None = None
    params: str | None = None
    family: str | None = None
    server: str | None = None
    gpu: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    world_size: int | None = None
    power: str | None = None
    catalog: Path | None = None
    step: Mapping[str, Any] = field(default_factory=dict)
    """Options that set a field of TrainSetup (OPTIONS), by their names. One that was not given is None or not there."""
    several: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options with several values, by name. Their own fields are None; ``each_of`` makes one set of options of each."""

    def value(self, name: str) -> Any:
        """The value of an option that has one; None for several values, and if it was not given."""
        return self.step.get(name) if name in OPTIONS else getattr(self, name)

    def is_given(self, name: str) -> bool:
        """Whether the user gave an option, with one value or several."""
        return self.value(name) is not None or name in self.several

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return the options with other values for some of them, by name."""
        step = {name: value for name, value in values.items() if name in OPTIONS}
        others = {name: value for name, value in values.items() if name not in OPTIONS}
        return replace(self, step={**self.step, **step}, **others)


_OF_PLACES = tuple(one.name for one in fields(SetupOptions) if one.name not in ("step", "several"))
"""Options that name a model or hardware."""


MOST_SETUPS = 10_000
"""The most combinations of lists: minutes of predictions."""

_USUAL = [one for one in FIELDS.values() if not one.seldom and one.has_words]
_FIRST = [one.word for one in sorted(_USUAL, key=lambda one: one.kind is Precision)]
"""Options that vary more slowly than the others of a setup, in this order: the order of several predictions in JSON."""


def each_of(options: SetupOptions, names: Collection[str] | None = None) -> Iterator[SetupOptions]:
    """Yield options for each combination of values, by default of all names. Raises SpecError above MOST_SETUPS."""
    chosen = {name: values for name, values in options.several.items() if names is None or name in names}
    count = math.prod(map(len, options.several.values()))
    if count > MOST_SETUPS:
        longest = max(options.several, key=lambda name: len(options.several[name])).replace("_", "-")
        raise SpecError(
            f"{count:,} setups are too many; up to {MOST_SETUPS:,}: a shorter list of --{longest}, or others"
        )
    rest = {name: values for name, values in options.several.items() if name not in chosen}
    order = sorted(chosen, key=lambda name: _FIRST.index(name) if name in _FIRST else 9 if name in OPTIONS else -1)
    for values in itertools.product(*(chosen[name] for name in order)):
        yield replace(options, several=rest).with_values(dict(zip(order, values, strict=True)))


class SetupCommand(click.Command):
    """A command whose help prints the setup's options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the options that describe the setup in one section per group, then the command's own options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        own: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                group = getattr(parameter, "group", None)
                (own if group is None else sections.setdefault(group, [])).append(record)
        for title, records in {**sections, "Options": own}.items():
            with formatter.section(title):
                formatter.write_dl(records)


class SetupOption(click.Option):
    """An option that knows its section of the help text, how the help writes it, and whether it takes lists."""

    def __init__(self, declarations: list[str], *, group: str, form: str, is_list: bool, **attributes: Any) -> None:
        super().__init__(declarations, **attributes)
        self.group, self.form, self.is_list = group, form, is_list

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option as it is written on the command line, and its help."""
        return None if self.hidden else (self.form.replace("/--", " / --"), self.help or "")


def given_options() -> list[str]:
    """Return the names of the running command's options that the user gave."""
    context = click.get_current_context()
    return [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]


FILE = click.Path(path_type=Path)

LORA_OPTIONS = {
    "--lora RANK|FIELDS": "Train PEFT's adapters in Hugging Face's code: 16, or rank=16,targets=q_proj+v_proj.",
    "--qlora RANK|FIELDS": "The same on linear layers whose weights bitsandbytes keeps in 4 bits.",
}
_MODEL = {
    "--model NAME": "A model of the catalogue (fsdp-bench models).",
    "--hf-config FILE": "A Hugging Face config.json: that model in transformers' code.",
    "--recorded FILE": "A model that `fsdp-bench record` has recorded.",
    "--code huggingface|torchtitan|benchmark": "Whose code is meant: transformers' or torchtitan's, which are recorded,"
    " or this tool's own.",
    "--attention sdpa|eager|flash_attention_2": "Hugging Face's attn_implementation; sdpa by default, the others are"
    " recorded once.",
    **LORA_OPTIONS,
    "--params 7B": "The nearest size on the ladder, 10M to 1T.",
    "--family llama|gpt2": "Family of the ladder; llama by default.",
}
_HARDWARE = {
    "--server NAME": "A server of the catalogue (fsdp-bench servers).",
    "--gpu NAME": "Only a GPU; links and host memory are then unknown.",
    "--nodes N": "Servers; 1 by default.",
    "--gpus-per-node N": "GPUs used on each; by default all of the server's.",
    "--world-size N": "GPUs in total, instead of --nodes.",
    "--power 500W": "Power limit of each GPU (nvidia-smi -pl); by default the server's, else the GPU's own.",
    "--catalog FILE": "A TOML file that adds to the catalogue or overrides it.",
}
_DEFAULTS = {
    "precision": DEFAULT_PRECISION,
    "seq": f"{DEFAULT_SEQUENCE_LENGTH}, or all positions of a model that has fewer",
}
"""Defaults that differ from TrainSetup's; cli/common/setups.py applies them."""

FILES = ("hf_config", "recorded", "catalog")

MODEL_LISTS = ("model", "params", "family", "code", "attention", "lora", "qlora")
"""Options that name a model and take several values."""
SETUP_LISTS = ("server", "gpu", "nodes", "gpus_per_node", "world_size", *OPTIONS)
"""Options that describe hardware and setup, each of which takes several values."""
EVERY_OPTION = (*MODEL_LISTS, *SETUP_LISTS)
"""All options that take several values."""


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def setup_options(
    *,
    lists: Collection[str] = (),
    defaults: Mapping[str, str] | None = None,
    repeatable: Collection[str] = (),
    without: Collection[str] = (),
    searched: Collection[str] = (),
) -> Decorator:
    """Add the options that describe a setup; the command gets their values as its argument ``options``.

    Args:
        lists: names of the options that take several values by comma (lists.py); the help of each says so, unless it
            is EVERY_OPTION, which the command's own help is to say.
        defaults: default values that differ from those of other commands, by option.
        repeatable: names of the options that may be given several times. The command gets each as a separate argument,
            a tuple, and its field in ``options`` is None.
        without: names of the options that the command does not take, or takes in another form.
        searched: names of the options for which the command tries several values, unless one is given.
    """
    sections = {"Model": dict(_MODEL), "Hardware": _HARDWARE}
    for one in OPTIONS.values():
        sections.setdefault(one.group, {})[str(one.form)] = one.help

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            names = [name for name in (*_OF_PLACES, *OPTIONS) if name not in (*repeatable, *without)]
            given = {name: _given(name, values) for name in names if name in values}
            several = {name: value for name, value in given.items() if isinstance(value, tuple)}
            for name in several.keys() - set(lists):
                written = shown(click.get_current_context().meta[name])
                raise SpecError(f"{name.replace('_', '-')}: {written} is several values; one is allowed here")
            one_each = {name: value for name, value in given.items() if name not in several}
            return function(options=SetupOptions(several=several).with_values(one_each), **values)

        made = [
            _option(form, text, group, lists, defaults or {}, repeatable, searched)
            for group, texts in sections.items()
            for form, text in texts.items()
            if option_of(form) not in without
        ]
        return with_options(made)(call)

    return decorate


def _given(name: str, values: dict[str, Any]) -> Any:
    """Take an option's value or values, of ``--this/--no-that`` the one given. Raises SpecError for both."""
    value, is_off = values.pop(name), values.pop(_off(name), False)
    if value is not None and is_off:
        raise SpecError(f"--{name.replace('_', '-')}: is given on and off; keep one, or write on,off for both")
    return False if is_off else value


def _off(name: str) -> str:
    return f"{name}_off"


def taken_together(argument: str, read: Callable[..., Any], options: Sequence[Decorator]) -> Decorator:
    """Add options to a command, which gets as one argument what ``read`` makes of their values, by their names."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            own = {name: values.pop(name) for name in inspect.signature(read).parameters if name in values}
            return function(**{argument: read(**own)}, **values)

        return with_options(options)(call)

    return decorate


def with_options(options: Sequence[Decorator]) -> Decorator:
    """Add options to a command, in the order in which its help lists them."""
    return lambda function: functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)


def _option(
    form: str,
    text: str,
    group: str,
    lists: Collection[str],
    defaults: Mapping[str, str],
    repeatable: Collection[str],
    searched: Collection[str],
) -> Decorator:
    """Build one option from its form on the command line: ``--seq N``, ``--compile`` or ``--this/--that``."""
    declaration, _, metavar = form.partition(" ")
    name = option_of(form)
    if name in lists and lists is not EVERY_OPTION:
        text += " Several by comma, or all."
    if name in repeatable:
        text += " May be given several times."
    if name in searched:
        text += " Default: searched."
    elif (default := defaults.get(name) or (_common_default(name) if metavar else None)) is not None:
        text += f" Default: {default}."
    common: dict[str, Any] = {"cls": SetupOption, "group": group, "form": form, "is_list": name in lists}
    attributes: dict[str, Any] = {"help": text, "default": defaults.get(name), "multiple": name in repeatable}
    attributes["type"] = FILE if name in FILES else str if name in repeatable else Values(name)
    if name not in OPTIONS or OPTIONS[name].kind is not bool:
        return click.option(declaration, name, metavar=metavar, **attributes, **common)
    on, _, off = declaration.partition("/")
    switch_on = click.option(on, name, is_flag=False, flag_value="on", metavar="on|off", **attributes, **common)
    if not off:
        return switch_on
    switch_off = click.option(off, _off(name), is_flag=True, hidden=True, **common)
    return lambda function: switch_on(switch_off(function))


def _common_default(name: str) -> str | None:
    """Return the default value that all commands share, as text for the help; None if there is none."""
    if name in _DEFAULTS:
        return _DEFAULTS[name]
    if name not in OPTIONS or OPTIONS[name].default is None:
        return None
    default = OPTIONS[name].default
    return format_count(default) if OPTIONS[name].is_magnitude else str(default)
