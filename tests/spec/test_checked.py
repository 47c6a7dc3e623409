"""Every public type reads its fields by their type however it is made, and refuses the rest in one line."""

import copy
import math
import pickle
import timeit
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from fsdp_bench.catalog.loader import BUILT_IN, gpus, models, servers
from fsdp_bench.spec.calibration_profile import MatmulTime, Profile, RankProfile
from fsdp_bench.spec.checked import CaseInsensitiveEnum, Checked
from fsdp_bench.spec.codec import from_builtins, from_json, to_builtins, to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware, Interconnect, LinkKind, Network, Source
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.record import RunPlan, TrialSpec
from fsdp_bench.spec.setup import FIELDS, Api, Checkpointing, Loss, OptimizerKind, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from tests.conftest import message_of
from tests.shapes import memory_of, shape

WORDS: dict[str, type[CaseInsensitiveEnum]] = {name: one.kind for name, one in FIELDS.items() if one.words}
"""The fields of TrainSetup that are words."""

SHAPE: dict[str, Any] = {**asdict(shape()), "family": "llama"}
SOURCE = Source(title="a page", date="2026")
RANKS: dict[str, Any] = {"num_ranks": 1, "threads_per_rank": 1, "launch_seconds": 0.0, "hook_seconds": {"fsdp1": 0}}


BLANKS = st.sampled_from(["", " ", "\t"])


@st.composite
def written_words(draw: st.DrawFn) -> tuple[str, str, CaseInsensitiveEnum]:
    """Draw a field, one of its words in any case, with blanks around it and - for _, and the member that it means."""
    field = draw(st.sampled_from(sorted(WORDS)))
    kind = WORDS[field]
    meant = {member.value: member for member in kind} | {alias: kind(value) for alias, value in kind.aliases.items()}
    word = draw(st.sampled_from(sorted(meant)))
    cased = "".join(draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in word)
    written = cased.replace("_", draw(st.sampled_from("_-")))
    return field, f"{draw(BLANKS)}{written}{draw(BLANKS)}", meant[word]


@given(written_words())
def test_a_word_in_any_case_is_its_member_however_a_setup_is_made(drawn: tuple[str, str, CaseInsensitiveEnum]) -> None:
    field, written, member = drawn
    for setup in (
        TrainSetup(**{field: written}),
        replace(TrainSetup(), **{field: written}),
        from_json(msgspec.json.encode({field: written}), TrainSetup),
        pickle.loads(pickle.dumps(TrainSetup(**{field: written}))),
    ):
        assert getattr(setup, field) is member


@given(st.sampled_from(sorted(WORDS)), st.text(max_size=30))
def test_any_other_text_is_refused_with_the_field_and_the_words(field: str, text: str) -> None:
    kind = WORDS[field]
    folded = text.strip().lower().replace("_", "-")
    known = {word.lower().replace("_", "-") for word in (*(m.value for m in kind), *kind.aliases)}
    if folded in known:
        return
    for make in (lambda: TrainSetup(**{field: text}), lambda: replace(TrainSetup(), **{field: text})):
        message = message_of(make)
        assert message.startswith(f"{field}: ")
        assert all(member.value in message for member in kind)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"checkpointing": "fulll"}, "checkpointing: 'fulll' is not allowed; one of none, selective, full (did you"),
        (
            {"strategy": "FULL_SHRD"},
            "strategy: 'FULL_SHRD' is not allowed; one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, "
            "_HYBRID_SHARD_ZERO2, fsdp, zero3, zero2, shard-grad, ddp, hsdp, hybrid-shard-zero2, 1, 2, 3, 4, 5"
            " (did you mean 'FULL_SHARD'?)",
        ),
        ({"optimizer": "adamx"}, "(did you mean 'adamw'?)"),
        ({"precision": "fp8"}, "precision: 'fp8' is not supported, only dtypes of 16 and 32 bits are; one of fp32,"),
        ({"precision": "bf16-mixd"}, "(did you mean 'bf16-mixed'?)"),
        ({"precision": "bf16/fp8/fp32"}, "precision: compute dtype 'fp8' is not allowed; one of fp32, bf16, fp16"),
        ({"precision": None}, "precision: None is not allowed"),
        ({"wrap": 0}, "wrap: 0 is not allowed"),
        ({"world_size": "8"}, "world_size: '8' is not allowed; a whole number"),
        ({"world_size": True}, "world_size: True is not allowed; a whole number"),
        ({"world_size": 8.5}, "world_size: 8.5 is not allowed; a whole number"),
        ({"world_size": math.nan}, "world_size: nan is not allowed; a whole number"),
        ({"world_size": 2**21}, "world_size: 2097152 is not allowed; up to 1048576"),
        ({"world_size": 10**5000}, "world_size: a value of type int is not allowed; up to 1048576"),
        ({"sequence_length": 10**30}, "sequence_length: 1000000000000000000000000000000 is not allowed; up to"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0 is not allowed; 1 or more"),
        ({"compile": "no"}, "compile: 'no' is not allowed; true or false"),
        ({"compile": 1}, "compile: 1 is not allowed; true or false"),
        ({"max_grad_norm": "1"}, "max_grad_norm: '1' is not allowed; a number"),
        ({"max_grad_norm": math.nan}, "max_grad_norm: nan is not allowed; a positive number, or leave it out"),
        ({"max_grad_norm": math.inf}, "max_grad_norm: inf is not allowed; a finite number, or leave it out"),
        ({"learning_rate": 10**400}, "(401 characters) is not allowed; a smaller number"),
        ({"seed": 2**80}, "seed: 1208925819614629174706176 is not allowed"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: 0.0 is not allowed"),
        ({"learning_rate": -1.0}, "learning_rate: -1.0 is not allowed"),
        ({"precision": "fp32/fp32"}, "precision: 'fp32/fp32' is not allowed; one of fp32,"),
        ({"shard_size": 4, "world_size": 8}, "shard_size: only HYBRID_SHARD and _HYBRID_SHARD_ZERO2 have one"),
        ({"shard_size": 3, "world_size": 8, "strategy": "hsdp"}, "shard_size: 3 is not allowed; a divisor"),
    ],
)
def test_a_wrong_field_of_a_setup_is_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    assert said in message_of(lambda: TrainSetup(**fields))


def test_numbers_that_can_mean_one_thing_are_that() -> None:
    setup = TrainSetup(
        world_size=np.int64(8),  # type: ignore[arg-type]
        sequence_length=2048.0,  # type: ignore[arg-type]
        micro_batch_size=np.float32(2),  # type: ignore[arg-type]
        max_grad_norm=1,
        compile=np.True_,  # type: ignore[arg-type]
    )
    held = (setup.world_size, setup.sequence_length, setup.micro_batch_size, setup.max_grad_norm, setup.compile)
    assert held == (8, 2048, 2, 1.0, True)
    assert [type(value) for value in held] == [int, int, int, float, bool]
    assert from_json(to_json(setup), TrainSetup) == setup == copy.deepcopy(setup)


def test_a_setup_of_texts_is_predicted_as_one_of_members() -> None:
    """With texts, checkpointing='none' was counted as full, optimizer='sgd' as AdamW and loss='chunked' as plain."""
    texts = TrainSetup(world_size=8, checkpointing="none", optimizer="sgd", loss="chunked")  # type: ignore[arg-type]
    members = TrainSetup(world_size=8, checkpointing=Checkpointing.NONE, optimizer=OptimizerKind.SGD, loss=Loss.CHUNKED)
    assert shape() == ModelShape(**SHAPE)
    assert memory_of(shape(), texts) == memory_of(shape(), members)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": "lama"}, "family: 'lama' is not allowed; one of llama, gpt2 (did you mean 'llama'?)"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers: 2.5 is not allowed; a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not allowed; 1 or more"),
        ({"hidden_size": 2**25}, "hidden_size: 33554432 is not allowed; up to 16777216"),
        ({"name": 7}, "name: 7 is not allowed; a text"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: 'false' is not allowed; true or false"),
    ],
)
def test_a_wrong_field_of_a_model_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    for make in (lambda: ModelShape(**{**SHAPE, **changes}), lambda: shape(**changes)):
        assert said in message_of(make)


def public_values() -> list[Checked]:
    """One value of every type that Python users and files make."""
    gpu, server = gpus()[0], servers()[0]
    matmul = MatmulTime(seconds=1.0, layout="nt", dtype="bf16", m=1, n=1, k=1)
    ranks = RankProfile(**RANKS, matmul=(matmul,))
    return [
        *(TrainSetup(), shape(), SOURCE, gpu, server, models()[0], RunPlan(), matmul, ranks),
        Interconnect(kind=LinkKind.PCIE, source=SOURCE),
        Network(kind=LinkKind.EFA, source=SOURCE),
        Hardware.of_gpu(gpu),
        Hardware(server=server, gpu=BUILT_IN.gpu(server.gpu), gpus_per_node=1),
        TrialSpec(id="a", model=shape(), setup=TrainSetup(), run=RunPlan(), device="cpu"),
        DryRunSpec(setup=TrainSetup(), model=shape()),
        UserModule(function="a:b"),
        Profile(machine="m", device="cuda", device_name="d", measured_on="2026", versions={}, ranks=(ranks,)),
    ]


@pytest.mark.parametrize("value", public_values(), ids=lambda value: type(value).__name__)
def test_every_field_of_every_public_type_refuses_what_it_is_not(value: Checked) -> None:
    wrong = object()
    for field in value.__struct_fields__:
        with pytest.raises(SpecError) as caught:
            replace(value, **{field: wrong})
        assert str(caught.value).startswith(f"{field}: "), caught.value
    assert from_builtins(to_builtins(value), type(value)) == value == pickle.loads(pickle.dumps(value))


def test_words_and_containers_of_other_types_are_read_too() -> None:
    gpu = replace(gpus()[0], product_names=["a", "b"], dense_flops_per_second={"bf16": 10**12})
    assert gpu.product_names == ("a", "b")
    assert type(gpu.dense_flops_per_second["bf16"]) is float
    assert Interconnect(kind="PCIe", source={"title": "t", "date": "2026"}).kind is LinkKind.PCIE  # type: ignore[arg-type]
    assert TrialSpec(id="a", model=SHAPE, setup={"api": "FSDP2"}, run={}, device="CPU").setup.api is Api.FSDP2  # type: ignore[arg-type]
    texts: dict[str, Any] = {"machine": "m", "device": "CUDA", "device_name": "", "measured_on": "", "versions": {}}
    assert Profile(**texts, ranks=[RANKS]).device == "cuda"  # type: ignore[list-item]
    with pytest.raises(SpecError, match=r"dense_flops_per_second.bf16: -1.0 is not allowed; 1000000 or more"):
        replace(gpu, dense_flops_per_second={"bf16": -1})
    with pytest.raises(SpecError, match=r"product_names\[1\]: 7 is not allowed; a text"):
        replace(gpu, product_names=("a", 7))
    with pytest.raises(SpecError, match="device: 'tpu' is not allowed; one of cuda, cpu, fake, emulated"):
        TrialSpec(id="a", model=shape(), setup=TrainSetup(), run=RunPlan(), device="tpu")  # type: ignore[arg-type]


def test_a_wrong_field_in_a_file_has_the_message_of_the_constructor() -> None:
    for document, said in (
        ({"setup": {"checkpointing": "fulll"}, "model": SHAPE}, "setup.checkpointing: 'fulll' is not allowed; one of"),
        ({"setup": {"world_size": "8"}, "model": SHAPE}, "setup.world_size: '8' is not allowed; a whole number"),
        ({"setup": {"worldsize": 8}, "model": SHAPE}, "unknown field 'setup.worldsize' (did you mean 'world_size'?)"),
        ({"model": SHAPE}, "has no `setup`"),
    ):
        with pytest.raises(msgspec.ValidationError) as caught:
            from_builtins(document, DryRunSpec)
        assert said in str(caught.value)
        assert isinstance(caught.value.__cause__, SpecError)


class Strange(Checked, frozen=True, kw_only=True):
    """Containers."""

    many: tuple[float, ...] = ()
    table: dict[str, int] = {}


def test_items_of_containers_are_read_with_their_ranges() -> None:
    assert Strange(many=[1, 2.5], table={"a": 3.0}) == Strange(many=(1.0, 2.5), table={"a": 3})  # type: ignore[arg-type,dict-item]
    with pytest.raises(SpecError, match=r"many\[1\]: nan is not allowed"):
        Strange(many=(1.0, math.nan))
    with pytest.raises(SpecError, match=r"table\.a: '3' is not allowed; a whole number"):
        Strange(table={"a": "3"})  # type: ignore[dict-item]


def test_checking_takes_microseconds() -> None:
    """A search makes thousands of setups, and predicts each in a millisecond or more."""
    setup = TrainSetup()
    seconds = min(timeit.repeat(lambda: replace(setup, world_size=8), number=1000, repeat=5)) / 1000
    assert seconds < 100e-6  # 6 on an idle core
