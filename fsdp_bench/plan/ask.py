"""estimate() and largest_model(), the functions for Python users. They take names or objects.

Arguments mean the same as on the command line: a server and the number of nodes give the world size. On several nodes,
a hybrid strategy shards within each node.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal, Unpack

from fsdp_bench.catalog.architectures import NotRecorded, parse_attention
from fsdp_bench.catalog.lookup import SIZE, Placement, cluster_of, find_placement
from fsdp_bench.catalog.lookup import model as find_model
from fsdp_bench.plan.defaults import (
    DEFAULT_PRECISION,
    Code,
    default_sequence_length,
    read_adapters,
    trained_code,
    trainer_defaults,
)
from fsdp_bench.plan.estimate import KERNELS
from fsdp_bench.plan.headroom import as_stated, sized, stated_headroom
from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.plan.search.quantity import size_ladder
from fsdp_bench.plan.search.search import LargestModel, find_largest
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.spec.calibration_profile import Calibration, Profile, Scaling, read_calibration
from fsdp_bench.spec.checked import build as build_checked
from fsdp_bench.spec.checked import read
from fsdp_bench.spec.errors import SpecError, not_allowed
from fsdp_bench.spec.hardware import Gpu, Hardware, Server
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import SetupFields, TrainSetup


def estimate(
    model: str | Path | Model | None = None,
    setup: TrainSetup | None = None,
    hardware: Hardware | None = None,
    kernels: Literal["cuda", "cpu", "cpu-gloo"] = "cuda",
    build: Build | str = Build.META,
    expandable_segments: bool = False,
    *,
    hf_config: str | Path | None = None,
    code: str | None = None,
    lora: int | str | LoRA | None = None,
    qlora: int | str | None = None,
    attention: str | None = None,
    gpus: str | None = None,
    gpu: str | Gpu | None = None,
    server: str | Server | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_memory: str | int | None = None,
    headroom: str | int | None = None,
    calibration: str | Path | Calibration | None = None,
    cuda: str | None = None,
    power: str | float | None = None,
    **setup_fields: Unpack[SetupFields],
) -> Prediction:
    """Predict memory, fit and time of one setup: ``estimate("Llama-3.1-8B", server="p5.48xlarge", strategy="zero3")``.

    Needs neither torch nor a GPU; takes a fraction of a second. The answer shows as a table in a notebook;
    ``pandas.DataFrame([answer.row()])`` makes a table of one or several.

    Args:
        model: a name of the catalogue, a size like ``"7B"``, the path of a Hugging Face config.json or of a recorded
            model, or the model itself.
        hf_config: the path of a Hugging Face config.json, whatever its name, instead of ``model``.
        code: whose code: ``huggingface``, ``torchtitan`` or ``benchmark``. By default Hugging Face's for a config.json
            and for models that the benchmark has no code of. Hugging Face's code that does not come recorded is
            recorded once, which needs torch and transformers and takes a minute.
        lora: PEFT's adapters in Hugging Face's code: their rank, or fields as ``"rank=16,targets=q_proj+v_proj"``.
        qlora: the same on weights of 4 bits.
        attention: transformers' attn_implementation: ``sdpa``, its default, ``eager`` or ``flash_attention_2``, which
            are recorded when they are asked for.
        gpus: how many of which GPU: ``"8 x H100-SXM"``. They are in the first server of the catalogue that has them,
            which says how they are connected; name a ``server`` for another.
        setup: the training setup; by default bf16-mixed, and 4096 tokens or all positions of a model with fewer.
        hardware: instead of the names below.
        kernels: the device whose kernels run: ``cuda``, ``cpu``, or ``cpu-gloo`` with gloo's own buffers.
        build: which ranks build the whole model in host memory before it is sharded: none (``meta``), ``rank-0``
            or ``every-rank``.
        expandable_segments: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        gpu: a GPU of the catalogue; links and host memory are then unknown, and so is the time of several GPUs.
        server: a server of the catalogue.
        nodes: how many servers; 1 by default, or what ``world_size`` needs.
        gpus_per_node: GPUs that are used on each node; by default all.
        gpu_memory: usable memory of a GPU, ``"24GiB"`` or bytes, instead of the catalogue's.
        headroom: memory kept free on each GPU for the CUDA context and NCCL, ``"2GiB"`` or bytes, instead of what
            headroom.py derives and assumes.
        calibration: the file, Profile or Scaling that ``fsdp-bench calibrate`` made, instead of the datasheet.
        cuda: version of CUDA of the torch in use, ``"12.1"``, which decides how fast its cuBLAS multiplies and which
            attention it takes; by default a recent one.
        power: power limit of each GPU, ``"500W"`` or watts; by default the server's, else the GPU's own.
        setup_fields: fields of TrainSetup by name, enums also as text (case-insensitive). They override ``setup``.

    Raises:
        SpecError: for values that are not allowed, naming the field, the value and the allowed values; and for setups
            that cannot run, with the reason.
    """
    named = (gpu, server, nodes, gpus_per_node)
    if gpus is not None:
        if hardware is not None or any(value is not None for value in named):
            raise SpecError("gpus: it says where; leave out hardware, gpu, server, nodes and gpus_per_node")
        hardware = cluster_of(gpus)
    if (model is None) == (hf_config is None):
        raise SpecError("estimate: name the model, or hf_config, the path of its config.json; and not both")
    which = Path(hf_config) if hf_config is not None else model
    assert which is not None
    given = setup.precision if isinstance(setup, TrainSetup) else DEFAULT_PRECISION
    precision = setup_fields.get("precision", given)
    adapters = read_adapters(lora, qlora, precision)
    try:
        known = find_model(which, code=code)
    except NotRecorded:
        known = None
    meant = trained_code(known) if known is not None and adapters is None else Code("huggingface", adapters is not None)
    fields = with_defaults(setup, setup_fields, known)
    where, found = _read(setup, hardware, named, fields, meant)
    shape = _model(
        which, found, where, code, adapters, setup_fields, None if attention is None else parse_attention(attention)
    )
    if kernels not in KERNELS:
        raise not_allowed("kernels", kernels, tuple(KERNELS))
    if isinstance(calibration, str | Path):
        calibration = read_calibration(Path(calibration))
    profile = calibration if isinstance(calibration, Scaling) else read(Profile | None, calibration, "calibration")
    where = as_stated(where, gpu_memory, profile, cuda, power)
    kept = stated_headroom(headroom, where)
    built = Build(read(Literal["meta", "rank-0", "every-rank"], str(build), "build"))
    question = Question(shape, found, where, kernels, built, expandable_segments, profile, kept)
    if question.impossible is not None:
        raise SpecError(question.impossible)
    return answer(question)


def _model(
    which: str | Path | Model,
    setup: TrainSetup,
    where: Hardware | None,
    code: str | None,
    adapters: LoRA | None,
    fields: SetupFields,
    attention: str | None,
) -> Model:
    sequence_length = setup.sequence_length
    is_file_of_code = str(which).endswith((".recorded.json", ".recorded.json.gz", ".recorded.json.xz"))
    is_size = isinstance(which, str) and SIZE.fullmatch(which) is not None
    if not isinstance(which, str | Path) or is_file_of_code or is_size or code == "benchmark":
        if adapters is not None:
            raise SpecError("lora: adapters go into Hugging Face's code: a model of the catalogue, or hf_config")
        if attention is not None:
            raise SpecError("attention: goes with Hugging Face's code: a model of the catalogue, or hf_config")
        return find_model(which, sequence_length, code=code)
    from fsdp_bench.plan.recording import found_or_recorded  # what starts processes

    is_offloaded = bool(fields.get("activation_offload"))
    return found_or_recorded(
        which,
        sequence_length,
        code=code,
        lora=adapters,
        activation_offload=is_offloaded,
        attention=attention,
        before_sm80=where is not None and where.gpu.lacks_flash_attention(setup.precision.compute),
    )


def largest_model(
    setup: TrainSetup | None = None,
    hardware: Hardware | None = None,
    family: Family | str = Family.LLAMA,
    check: FitCheck | None = None,
    *,
    gpu: str | Gpu | None = None,
    server: str | Server | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu_memory: str | int | None = None,
    headroom: str | int | None = None,
    **setup_fields: Unpack[SetupFields],
) -> LargestModel:
    """Find the largest model that fits: ``largest_model(server="g5.48xlarge", precision="bf16-mixed")``.

    Searches the size ladder, 10M to 1T parameters. In the answer ``model`` is the largest model that fits, ``at`` its
    estimate, and ``limited_by`` the memory that the next larger model exceeds.

    Of the arguments, ``family`` is ``llama`` or ``gpt2``, and ``check`` has assumptions other than the defaults. All
    others are those of ``estimate``.

    Raises:
        SpecError: for values that are not allowed, for a GPU of unknown memory, and for setups that cannot run.
    """
    fields = with_defaults(setup, setup_fields)
    where, found = _read(setup, hardware, (gpu, server, nodes, gpus_per_node), fields)
    known = sized(where, gpu_memory, None)
    check = check or FitCheck()
    if headroom is not None:
        check = dataclasses.replace(check, headroom_bytes=stated_headroom(headroom, known))
    return LargestModel(**vars(find_largest(size_ladder(Family(family), found, known), check)))


def read_setup(setup: TrainSetup | None, setup_fields: SetupFields, model: Model) -> TrainSetup:
    """Return a setup with some of its fields replaced. Raises SpecError for a value that is not allowed."""
    fields = with_defaults(setup, setup_fields, model)
    return _read(setup, None, (None, None, None, None), fields, trained_code(model))[1]


def with_defaults(setup: TrainSetup | None, fields: SetupFields, model: Model | None = None) -> SetupFields:
    """Return the fields. If there is no setup, add the defaults of all commands for fields that are not given."""
    if setup is not None:
        return fields
    return {"precision": DEFAULT_PRECISION, "sequence_length": default_sequence_length(model), **fields}


def _read(
    setup: TrainSetup | None,
    hardware: Hardware | None,
    named: tuple[str | Gpu | None, str | Server | None, int | None, int | None],
    setup_fields: SetupFields,
    code: Code = Code(),  # noqa: B008 - immutable
) -> tuple[Hardware | None, TrainSetup]:
    """Return the hardware of a setup, and the setup with the world size of that hardware and the code's defaults."""
    setup = read(TrainSetup | None, setup, "setup")
    given: dict[str, Any] = dict(setup_fields)
    own = {} if setup is None else {name: getattr(setup, name) for name in setup.__struct_fields__}
    written = build_checked(TrainSetup, {**own, **given, "shard_size": None})
    gpu, server, nodes, gpus_per_node = named
    says_world = "world_size" in given or (setup is not None and nodes is None)
    world_size = written.world_size if says_world else None
    if hardware is None:
        place = find_placement(gpu, server, nodes, gpus_per_node, world_size)
    elif any(value is not None for value in named):
        raise SpecError("hardware: it says where; leave out gpu, server, nodes and gpus_per_node")
    else:
        place = _place_of(hardware, world_size)
    shard_size = given.get("shard_size", None if setup is None else setup.shard_size)
    sizes = place.sizes(written.strategy, shard_size)
    if setup is None:
        own = trainer_defaults(code, given, place.world_size)
    return place.hardware, build_checked(TrainSetup, {**own, **given, **sizes})


def _place_of(hardware: Hardware, world_size: int | None) -> Placement:
    """Return the hardware, with its own world size or that of the setup. One other than the nodes' is refused."""
    try:
        hardware = read(Hardware, hardware, "hardware")
    except SpecError as error:
        raise SpecError(f"{error}, or its name: server=, gpu=") from None
    world = hardware.world_size if world_size is None else world_size
    if not hardware.holds(world):
        raise SpecError(f"world_size: {world} is not the cluster's {hardware.world_size} GPUs")
    return Placement(hardware, hardware.num_nodes, hardware.ranks_per_node(world), world)
