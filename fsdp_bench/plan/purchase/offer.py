"""Offer: servers with speed, days, price and energy. SettingOffer: one of a model. OfferDocument: the JSON form."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import msgspec

from fsdp_bench.plan.defaults import assumptions
from fsdp_bench.plan.document import Bytes, Count, Positive
from fsdp_bench.plan.headroom import Headroom
from fsdp_bench.plan.prediction import Prediction, answer, answer_if_it_fits
from fsdp_bench.plan.purchase.fastest import Timed
from fsdp_bench.plan.purchase.goal import SECONDS_PER_DAY, Goal, Terms
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.ranges import PeakRange, Range, peak_range, speed_range
from fsdp_bench.rates.collectives import is_over_pcie
from fsdp_bench.rates.datasheet import products_efficiency
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.price import Price
from fsdp_bench.spec.setup import TrainSetup

MICRO_BATCHES = 3
"""Micro-batches of a step after which the allocator does the same for each further one."""


class OfferMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of an offer."""

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes
    peak_reserved_bytes_range: tuple[Bytes, Bytes] | None = None
    range_because: str | None = None
    headroom_bytes: int | None = None
    required_headroom_bytes: Bytes | None = None
    required_headroom_source: str | None = None
    breakdown_bytes: dict[str, Bytes] = {}

    @classmethod
    def of(cls, allocated: int, reserved: int, left: int | None, kept_free: Headroom, peaks: PeakRange | None) -> Self:
        """Return bytes at the peaks, those that are left, and those that are kept free."""
        return cls(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            peak_reserved_bytes_range=peaks and (round(reserved * peaks.lowest), round(reserved * peaks.highest)),
            range_because=peaks and peaks.because,
            headroom_bytes=left,
            required_headroom_bytes=kept_free.num_bytes,
            required_headroom_source=kept_free.source,
        )


OfferKey = tuple[str, int, TrainSetup | None, tuple[str, ...]]
"""The facts by which offers differ: server, number of nodes, setup, and a script's command."""


class OfferDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One offer of a plan."""

    server: str
    gpu: str
    gpu_power_watts: float | None = None
    """The power limit of each GPU, if it is not the GPU's default."""
    num_nodes: Count
    num_gpus: Count
    setup: TrainSetup | None = None
    """None for a script."""
    assumptions: tuple[str, ...] = ()
    expandable_segments: bool = False
    values: dict[str, str] = {}
    """The values of a script's placeholders that differ between offers."""
    command: tuple[str, ...] = ()
    """The script's command with its values."""
    tokens_per_step: Count | None = None
    """Tokens of an optimizer step of a script on all GPUs."""
    memory: OfferMemory
    tokens_per_second_per_gpu: Positive
    tokens_per_second_per_gpu_range: tuple[Positive, Positive] | None
    range_because: str | None
    is_like_published: bool = True
    """Whether published runs on such GPUs check its speed."""
    seconds: Positive | None
    fast_seconds: Positive | None = None
    slow_seconds: Positive | None
    price_per_hour: Positive | None
    cost: Positive | None
    fast_cost: Positive | None = None
    slow_cost: Positive | None
    energy_megawatt_hours: Positive | None
    slow_energy_megawatt_hours: Positive | None = None

    @property
    def key(self) -> OfferKey:
        """The kind of server, the number of nodes, and the setting."""
        return self.server, self.num_nodes, self.setup, self.command


@dataclass(frozen=True, kw_only=True)
class Offer(ABC):
    """So many servers and what trains on them, with its days, price and energy."""

    source: ClassVar[str]
    """``predicted`` or ``rehearsed``."""
    goal: Terms
    price: Price | None

    @property
    @abstractmethod
    def cluster(self) -> Hardware:
        """The servers."""

    @property
    @abstractmethod
    def tokens_per_second_per_gpu(self) -> float:
        """The speed of one GPU."""

    @property
    @abstractmethod
    def range(self) -> Range | None:
        """The range of its speed; None if no run that resembles it was ever compared."""

    @property
    @abstractmethod
    def identity(self) -> Hashable:
        """The key, and what trains: offers of the same servers may differ in it."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The offer in one line: servers, days, price and what trains."""

    @property
    @abstractmethod
    def what(self) -> dict[str, Any]:
        """The columns of a table that say what trains."""

    @abstractmethod
    def document(self) -> OfferDocument:
        """Return the offer as a document."""

    @property
    def key(self) -> tuple[str, int]:
        """The kind of server and the number of nodes."""
        return self.cluster.server.name, self.cluster.num_nodes

    @cached_property
    def tokens_per_second(self) -> float:
        """The speed of all GPUs."""
        return self.tokens_per_second_per_gpu * self.cluster.world_size

    @property
    def seconds(self) -> float | None:
        """The time to train on the goal's tokens, as predicted; None without tokens."""
        return None if self.goal.tokens is None else self.goal.tokens / self.tokens_per_second

    @cached_property
    def slow_seconds(self) -> float | None:
        """The same at the slow end of the range; as predicted where there is no range."""
        return None if self.seconds is None else self.seconds / (self.range.slowest if self.range else 1.0)

    @property
    def fast_seconds(self) -> float | None:
        """The same at the fast end of the range; as predicted where there is no range."""
        return None if self.seconds is None else self.seconds / (self.range.fastest if self.range else 1.0)

    @cached_property
    def per_hour(self) -> float | None:
        """The price of all servers for one hour; None if it is not documented."""
        server = self.cluster.server
        if self.goal.stated_price is not None:
            return self.goal.stated_price.of_node(self.cluster.gpus_per_node) * self.cluster.num_nodes
        if self.price is None:
            return None
        one = self.price.per_hour(self.goal.tariff, server.power_watts)
        return None if one is None else one * self.cluster.num_nodes

    @property
    def currency(self) -> str | None:
        """The currency of its prices; None if that is not known."""
        if self.goal.stated_price is not None:
            return self.goal.stated_price.currency
        return None if self.price is None else self.price.currency

    @property
    def cost(self) -> float | None:
        """The price of training, as predicted."""
        return self._price_of(self.seconds)

    @property
    def slow_cost(self) -> float | None:
        """The same for ``slow_seconds``."""
        return self._price_of(self.slow_seconds)

    @property
    def fast_cost(self) -> float | None:
        """The same for ``fast_seconds``."""
        return self._price_of(self.fast_seconds)

    def _price_of(self, seconds: float | None) -> float | None:
        return None if self.per_hour is None or seconds is None else self.per_hour * seconds / 3600

    @cached_property
    def cost_per_billion_tokens(self) -> float | None:
        """The price of training on a billion tokens."""
        if self.per_hour is None:
            return None
        return self.per_hour / 3600 / self.tokens_per_second * 1e9

    @property
    def megawatt_hours(self) -> float | None:
        """The energy of all servers at their largest power, as predicted; None if that is not documented."""
        watts = self.cluster.server.power_watts
        if watts is None or self.seconds is None:
            return None
        return watts * self.cluster.num_nodes * self.seconds / 3600 / 1e6

    @property
    def slow_megawatt_hours(self) -> float | None:
        """The same for ``slow_seconds``."""
        if self.megawatt_hours is None or self.seconds is None or self.slow_seconds is None:
            return None
        return self.megawatt_hours * self.slow_seconds / self.seconds

    @property
    def meets_deadline(self) -> bool:
        """Whether it ends in time even if its speed is off as far as predictions have been."""
        limit = self.goal.deadline_seconds
        return limit is None or (self.slow_seconds is not None and self.slow_seconds <= limit)

    @property
    def meets_budget(self) -> bool:
        """Whether it costs no more than the budget, at the slow end. An unknown price does not."""
        limit = self.goal.budget
        return limit is None or (self.slow_cost is not None and self.slow_cost <= limit)

    def line(self, what: str, source: str) -> str:
        """Return the offer in one line."""
        cluster = self.cluster
        days = [] if self.seconds is None else [f"{self.seconds / SECONDS_PER_DAY:,.1f} days"]
        price = [] if self.cost is None else [f"price {self.cost:,.0f} {self.currency or ''}".rstrip()]
        speed = f"{self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        return ", ".join([f"{cluster.num_nodes} x {cluster.server.name}", *days, *price, speed, what]) + f" ({source})"

    def row(self) -> dict[str, Any]:
        """Return the offer as one row of a table. Columns are called as in ``plan --json``; None is what is unknown."""
        found = self.document()
        slowest, fastest = found.tokens_per_second_per_gpu_range or (None, None)
        return {
            **{"source": self.source, **self.what},
            "peak_reserved_bytes": found.memory.peak_reserved_bytes,
            "headroom_bytes": found.memory.headroom_bytes,
            **{name: getattr(found, name) for name in ("server", "gpu", "num_nodes", "num_gpus")},
            "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
            "slowest_tokens_per_second_per_gpu": slowest,
            "fastest_tokens_per_second_per_gpu": fastest,
            **{name: getattr(found, name) for name in _OF_TRAINING},
        }

    def _document(self, memory: OfferMemory, **own: Any) -> OfferDocument:
        """Return what every offer says, with the fields that are its own."""
        span, speed = self.range, self.tokens_per_second_per_gpu
        return OfferDocument(
            server=self.cluster.server.name,
            gpu=self.cluster.gpu.name,
            gpu_power_watts=self.cluster.gpu.power_limit_watts,
            num_nodes=self.cluster.num_nodes,
            num_gpus=self.cluster.world_size,
            memory=memory,
            tokens_per_second_per_gpu=speed,
            tokens_per_second_per_gpu_range=span and (speed * span.slowest, speed * span.fastest),
            range_because=span and span.because,
            is_like_published=span is not None and span.is_like_published,
            seconds=self.seconds,
            fast_seconds=self.fast_seconds,
            slow_seconds=self.slow_seconds,
            price_per_hour=self.per_hour,
            cost=self.cost,
            fast_cost=self.fast_cost,
            slow_cost=self.slow_cost,
            energy_megawatt_hours=self.megawatt_hours,
            slow_energy_megawatt_hours=self.slow_megawatt_hours,
            **own,
        )


_OF_TRAINING = OfferDocument.__struct_fields__[OfferDocument.__struct_fields__.index("seconds") :]
"""Days, price and energy."""


@dataclass(frozen=True, kw_only=True)
class SettingOffer(Offer):
    """One setting of a model on so many servers."""

    source = "predicted"
    goal: Goal
    timed: Timed
    expandable_segments: bool = False
    steps: SimulatedSteps | None = None
    """The steps of ``replayed(timed.setup)`` on the GPU's kernels, where they are simulated already."""

    @property
    def cluster(self) -> Hardware:
        """The servers."""
        return self.timed.cluster

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The speed of one GPU, as predicted."""
        return self.timed.tokens_per_second_per_gpu

    @property
    def identity(self) -> tuple[str, int, TrainSetup]:
        """The key, and the setting."""
        return (*self.key, self.timed.setup)

    def fits_if_higher(self, times: float) -> bool:
        """Return whether it fits, and still does if its peak is so many times as high."""
        if (found := self._if_it_fits) is None:
            return False
        available = found.available_bytes
        return available is None or times * found.needed_bytes <= available

    @cached_property
    def range(self) -> Range | None:
        """The range of its speed."""
        cluster, setup = self.cluster, self.timed.setup
        flops, peak = self.goal.model.hardware_flops_per_token(setup), cluster.gpu.peak_flops_per_second("bf16")
        products = (flops or 0.0) * self.tokens_per_second_per_gpu / (peak or 1.0) / products_efficiency(cluster.gpu)
        over_pcie = is_over_pcie(cluster) and cluster.gpus_per_node > 1
        return speed_range(cluster, setup, over_pcie, self.goal.calibration, min(products, 1.0))

    @property
    def text(self) -> str:
        """The offer in one line: servers, days, price and setting."""
        setup = self.timed.setup
        setting = f"{setup.strategy.value} {setup.api.value} checkpointing {setup.checkpointing.value}"
        return self.line(f"{setting}, batch {setup.micro_batch_size}", "predicted")

    @property
    def what(self) -> dict[str, Any]:
        """The columns of a table that say what trains: the model, and the fields of the setup."""
        setup = to_builtins(self.timed.setup)
        return {"model": self.goal.model.name, **setup, "expandable_segments": self.expandable_segments}

    def document(self) -> OfferDocument:
        """Return the offer as a document."""
        found, setup = self.prediction, self.timed.setup
        sizes = found.memory.peak_allocated_bytes, found.needed_bytes, found.headroom_bytes
        memory = OfferMemory.of(*sizes, found.required_headroom, peak_range(setup.compile))
        return self._document(
            msgspec.structs.replace(memory, breakdown_bytes=found.memory.breakdown_bytes),
            setup=setup,
            assumptions=assumptions(self.goal.model, setup),
            expandable_segments=self.expandable_segments,
        )

    @property
    def prediction(self) -> Prediction:
        """Its memory with PyTorch's caching allocator; only the first few micro-batches are replayed."""
        return self._if_it_fits or self._of_too_small

    @cached_property
    def _if_it_fits(self) -> Prediction | None:
        return answer_if_it_fits(self._question)

    @cached_property
    def _of_too_small(self) -> Prediction:
        return answer(self._question)

    @property
    def _question(self) -> Question:
        question = Question(
            self.goal.model,
            replayed(self.timed.setup),
            self.cluster,
            expandable_segments=self.expandable_segments,
            profile=self.goal.calibration,
            headroom_bytes=self.goal.headroom_bytes,
        )
        return question if self.steps is None else question.with_steps(self.steps)


def replayed(setup: TrainSetup) -> TrainSetup:
    """Return a setup with as many micro-batches as the allocator's replay needs."""
    steps = min(setup.gradient_accumulation_steps, MICRO_BATCHES)
    return msgspec.structs.replace(setup, gradient_accumulation_steps=steps)
