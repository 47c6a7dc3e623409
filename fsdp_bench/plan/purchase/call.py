"""plan_training(): a plan in one call from Python. Arguments mean the same as on the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdp_bench.catalog.loader import BUILT_IN, load_user_catalog
from fsdp_bench.catalog.lookup import in_other_code
from fsdp_bench.catalog.lookup import model as find_model
from fsdp_bench.plan.ask import with_defaults
from fsdp_bench.plan.defaults import trained_code, trainer_defaults
from fsdp_bench.plan.purchase.goal import Goal, parse_duration, parse_money, parse_tokens
from fsdp_bench.plan.purchase.planner import NODES, Plan, kinds_of, plan
from fsdp_bench.spec.checked import build as build_checked
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.price import Tariff, parse_price
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import FIELDS, PLANNED, TrainSetup
from fsdp_bench.spec.units import parse_bytes


def plan_training(
    model: str | Path | Model | None = None,
    tokens: str | int | None = None,
    *,
    hf_config: str | Path | None = None,
    code: str | None = None,
    servers: str | Sequence[str] = (),
    nodes: Iterable[int] = NODES,
    deadline: str | None = None,
    budget: str | float | None = None,
    global_batch: str | int | None = None,
    price: str | None = None,
    tariff: Tariff | str = Tariff.ON_DEMAND,
    headroom: str | int | None = None,
    catalog: str | Path | None = None,
    **setup_fields: Any,
) -> Plan:
    """Find servers, their number and a setting: ``plan_training("Llama-3.1-8B", "1T", deadline="30d")``.

    Needs neither torch nor a GPU; takes seconds. ``winner`` of the answer is the best offer, ``reason`` says why, and
    ``pandas.DataFrame(found.rows())`` makes a table of all that are shown.

    Args:
        model: a name of the catalogue, a size like ``"7B"``, the path of a config.json or of a recorded model.
        tokens: tokens to train on, ``"1T"`` or a number; without it, the best setting on the fewest GPUs.
        hf_config: the path of a Hugging Face config.json, instead of ``model``.
        code: whose code: ``huggingface``, ``torchtitan`` or ``benchmark``.
        servers: servers of the catalogue; by default all.
        nodes: the numbers of nodes to choose from.
        deadline: when training must have ended: ``"30d"``, ``"12h"``, ``"6 weeks"``.
        budget: the most that it may cost: ``"200k"`` or a number.
        global_batch: tokens of one optimizer step on all GPUs; by default one micro-batch on each.
        price: the price of every server, ``"$2.10/gpu-hour"`` or ``"98 EUR/node-hour"``, instead of the catalogue's.
        tariff: which of the catalogue's prices counts: ``on-demand``, ``reserved`` or ``spot``.
        headroom: memory kept free on each GPU for the CUDA context and NCCL, ``"2GiB"`` or bytes.
        catalog: a file with GPUs, servers and prices of one's own.
        setup_fields: fields of TrainSetup that are not searched; several values of those in PLANNED leave the choice.

    Raises:
        SpecError: for values that are not allowed, naming the argument, the value and what is allowed.
    """
    if (model is None) == (hf_config is None):
        raise SpecError("plan_training: name the model, or hf_config, the path of its config.json; and not both")
    which = Path(hf_config) if hf_config is not None else model
    assert which is not None
    entries = BUILT_IN if catalog is None else load_user_catalog(Path(catalog))
    given = {name: _values(value) for name, value in setup_fields.items()}
    for name, values in given.items():
        if len(values) > 1 and name not in PLANNED:
            raise SpecError(f"{name}: several values; plan_training chooses among those of {', '.join(PLANNED)}")
        if name in FIELDS and (reason := FIELDS[name].not_planned) is not None:
            raise SpecError(f"{name}: plan_training does not take it, because {reason}; estimate does")
    single = {name: values[0] for name, values in given.items() if len(values) == 1}
    named_model = find_model(which, code=code, catalog=entries)
    fields = dict(with_defaults(None, single, named_model))  # type: ignore[arg-type]
    first = {name: values[0] for name, values in given.items()}
    fields |= trainer_defaults(trained_code(named_model), first, None)
    read = build_checked(TrainSetup, fields)
    found = find_model(which, read.sequence_length, code=code, catalog=entries)
    goal = Goal(
        model=found,
        other=in_other_code(which, found, read.sequence_length, entries),
        fixed={name: getattr(read, name) for name in fields},
        open={
            name: tuple(getattr(build_checked(TrainSetup, {**fields, name: one}), name) for one in values)
            for name, values in given.items()
            if len(values) > 1
        },
        tokens=None if tokens is None else parse_tokens(str(tokens), "tokens"),
        deadline_seconds=None if deadline is None else parse_duration(deadline),
        budget=None if budget is None else parse_money(str(budget)),
        global_batch_tokens=None if global_batch is None else parse_tokens(str(global_batch), "global_batch"),
        tariff=Tariff(tariff),
        stated_price=None if price is None else parse_price(price),
        headroom_bytes=None if headroom is None else parse_bytes(str(headroom), "headroom"),
    )
    named = [servers] if isinstance(servers, str) else servers
    return plan(goal, kinds_of(entries, named), sorted(set(nodes)))


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
