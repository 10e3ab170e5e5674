"""An experiment as a TOML file says it: models, clusters, workloads, systems, impairments, windows.

What is compared stands in tables of named entries (`[systems.ep]`, `[workloads.gsm8k]`). A run is
made for every combination; `figures` says which numbers of these runs are the result. A table with
one entry may be written without a name: `[model]`, `[cluster]`, `[workload]`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from asyncmoe.config import Section
from asyncmoe.errors import ConfigError, UnknownName
from asyncmoe.virtual.costs import HostCosts
from asyncmoe.virtual.shapes import Hardware, ModelShape, find_hardware, find_model
from asyncmoe.workload.arrivals import make_arrivals
from asyncmoe.workload.lengths import make_lengths
from asyncmoe.workload.workload import WorkloadConfig

FILE_BYTES = 1 << 20
_NOT_IN_NAMES = "@: \t"  # since `figures` have a meaning for them
DIMENSIONS = ("model", "cluster", "workload", "system", "impairment")
_PLURAL = {name: f"{name}s" for name in DIMENSIONS}


class ModelTable(Section):
    """A simulated model: a published shape, or numbers, or a shape with some numbers changed."""

    shape: str | None = Field(None, description="Name of a built-in shape")
    layers: int | None = Field(None, ge=1, description="Decoder layers, dense ones included")
    hidden: int | None = Field(None, ge=1, description="Width of a row")
    experts: int | None = Field(None, ge=1, description="Experts of a layer")
    top_k: int | None = Field(None, ge=1, description="Experts of a row")
    expert_intermediate: int | None = Field(None, ge=1, description="Inner width of an expert")
    query_heads: int | None = Field(None, ge=1, description="Heads of queries")
    kv_heads: int | None = Field(None, ge=1, description="Heads of keys and values")
    head_dim: int | None = Field(None, ge=1, description="Width of a head")
    vocab: int | None = Field(None, ge=2, description="Rows of the LM head")
    shared_experts: int | None = Field(None, ge=0, description="Experts of every row, at home")
    dense_layers: int | None = Field(None, ge=0, description="First layers without experts")
    dense_intermediate: int | None = Field(None, ge=0, description="Their inner width")
    window: int | None = Field(None, ge=1, description="Positions that windowed layers see")
    windowed_share: float | None = Field(None, ge=0, le=1, description="Of the layers")
    value_bytes: int | None = Field(None, ge=1, le=8, description="Of weights, rows and cache")
    context: int = Field(4096, ge=2, description="Longest sequence in tokens")

    def made(self) -> ModelShape:
        """The shape. Raises `UnknownName`, `ConfigError` naming the number that is missing."""
        values = _given(self, ModelShape)
        if self.shape is not None:
            made = replace(find_model(self.shape), **values)
        else:
            optional = {"shared_experts", "dense_layers", "dense_intermediate"}
            optional |= {"window", "windowed_share", "value_bytes"}
            _complete("model", values, ModelShape, optional)
            made = ModelShape(name="custom", **values)
        if made.top_k > made.experts:
            raise ConfigError(
                f"model.top_k is {made.top_k} of {made.experts} experts; allowed: 1 to as many as "
                "model.experts"
            )
        if made.moe_layers < 1:
            raise ConfigError(
                f"model.dense_layers is {made.dense_layers} of {made.layers} layers; allowed: "
                "fewer than model.layers"
            )
        return made


class WindowTable(Section):
    """How long a run is, and what of it counts."""

    ramp_s: float = Field(1.0, ge=0, description="The start that does not count")
    measure_s: float = Field(10.0, gt=0, description="What counts")
    best_s: float = Field(60.0, gt=0, description="Length of the best window")


class ClusterTable(Section):
    """Simulated hosts, their devices and the network between them."""

    hosts: int = Field(1, ge=1, description="Hosts; each has a NIC that its ranks share")
    groups: int = Field(1, ge=1, description="Independent groups that the devices make")
    window: WindowTable | None = Field(None, description="Instead of the experiment's")
    hardware: str | None = Field(None, description="Name of built-in hardware")
    ranks_per_host: int | None = Field(None, ge=1, description="Devices of a host")
    flop_per_s: float | None = Field(None, gt=0, description="Peak of a device, dense")
    memory_bytes_per_s: float | None = Field(None, gt=0, description="Peak of a device")
    memory_bytes: float | None = Field(None, gt=0, description="Memory of a device")
    nic_bytes_per_s: float | None = Field(None, gt=0, description="Of a host, each way")
    local_bytes_per_s: float | None = Field(None, gt=0, description="Between devices of a host")
    flop_share: float | None = Field(None, gt=0, le=1, description="Part of the peak reached")
    memory_share: float | None = Field(None, gt=0, le=1, description="Part of the peak reached")
    launch_us: float | None = Field(None, ge=0, description="Of a step, beyond its work")
    latency_us: float = Field(5.0, ge=0, description="Of a link between hosts")
    local_latency_us: float = Field(5.0, ge=0, description="Of a link within a host")
    jitter_us: float = Field(0.0, ge=0, description="At most, on links between hosts; random")

    def made(self) -> Hardware:
        """The hardware. Raises `UnknownName`, `ConfigError` naming the number that is missing."""
        values = _given(self, Hardware)
        if self.launch_us is not None:
            values["launch_s"] = 1e-6 * self.launch_us
        if self.hardware is not None:
            return replace(find_hardware(self.hardware), **values)
        optional = {"flop_share", "memory_share", "launch_s"}
        _complete("cluster", values, Hardware, optional)
        return Hardware(name="custom", **values)

    @property
    def ranks(self) -> int:
        """All devices."""
        return self.hosts * self.made().ranks_per_host


class HostTable(Section):
    """CPU time of a rank's loop, which is serial; what of it is hidden comes out of the run."""

    attention_us: float = Field(0.0, ge=0, description="Of an attention step")
    expert_us: float = Field(0.0, ge=0, description="Of an expert step")
    head_us: float = Field(0.0, ge=0, description="Of a head step")
    before_share: float = Field(
        0.5, ge=0, le=1, description="Part of a step's that comes before the device can begin"
    )
    parcel_out_us: float = Field(0.0, ge=0, description="Of a parcel that is sent")
    parcel_in_us: float = Field(0.0, ge=0, description="Of a parcel that comes")
    message_us: float = Field(0.0, ge=0, description="Of a control message, at both ends")

    def made(self) -> HostCosts:
        """In seconds."""
        values = self.model_dump()
        share = values.pop("before_share")
        seconds = {f"{key.removesuffix('_us')}_s": 1e-6 * value for key, value in values.items()}
        return HostCosts(before_share=share, **seconds)


class WorkloadTable(WorkloadConfig):
    """A workload, and where its rows go."""

    per_rank: int | None = Field(
        None,
        ge=1,
        description="A closed loop of so many requests for each device, all of them underway at "
        "the start; instead of arrivals",
    )
    routing: str = Field("uniform", description="Expert choices: see model.routing")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        """Without the need for an end: a run's window sets one."""
        make_arrivals(self.arrivals)
        make_lengths(self.lengths)
        for name in ("arrivals", "underway"):
            value = getattr(self, name)
            if self.per_rank is not None and value != type(self).model_fields[name].default:
                raise ValueError(f"per_rank is {self.per_rank} and {name} {value!r}; give one")
        return self


class SystemTable(Section):
    """How the model is run: a scheduling rule, a layout of the ranks, settings of the engine."""

    scheduler: str = Field("defrag_aging", description="Registered name or path.py:Class")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Of the scheduler")
    replicas: int = Field(
        1, ge=1, description="Independent groups of ranks with all experts each (EP x DP)"
    )
    tensor: int = Field(
        1, ge=1, description="Devices that share every layer's weights and act as one rank"
    )
    pipeline: int = Field(
        1, ge=1, description="Stages of a pipeline of tensor-parallel devices (PP x TP)"
    )
    collective: bool = Field(
        False,
        description="Rows for all ranks cross a host's NIC once and are copied inside, as in an "
        "all-gather; only for rules that send rows to all ranks",
    )
    config: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Settings of the engine by section and key"
    )

    @model_validator(mode="after")
    def _pipelines_are_whole(self) -> Self:
        if self.pipeline > 1 and self.replicas > 1:
            raise ValueError("pipeline and replicas cannot both be above 1")
        return self


class ImpairmentTable(Section):
    """What is wrong with the network."""

    network: dict[str, Any] = Field(
        default_factory=dict, description="Options of the modelled network (virtual runs only)"
    )
    links: dict[str, Any] = Field(
        default_factory=dict, description="Options of the transport `impaired`"
    )


class TargetTable(Section):
    """What makes a request good."""

    ttft_ms: float = Field(2000.0, gt=0, description="Longest time to the first token")
    itl_ms: float = Field(200.0, gt=0, description="Longest mean time between tokens")


class Experiment(Section):
    """All of it."""

    name: str = Field(pattern=r"^[a-z0-9_-]+$", description="Short name")
    title: str = Field("", description="One line for the report")
    about: str = Field("", description="What is repeated, and which figures the costs follow from")
    world: Literal["virtual", "live"] = Field("virtual", description="Where it runs")
    seed: int = Field(0, ge=0, description="Of workloads, routing, jitter, interleaving")
    models: dict[str, ModelTable] = Field(min_length=1, description="Models")
    clusters: dict[str, ClusterTable] = Field(min_length=1, description="Clusters")
    workloads: dict[str, WorkloadTable] = Field(min_length=1, description="Workloads")
    systems: dict[str, SystemTable] = Field(min_length=1, description="What is compared")
    impairments: dict[str, ImpairmentTable] = Field(
        default_factory=lambda: {"none": ImpairmentTable()}, description="States of the network"
    )
    host: HostTable = Field(default_factory=HostTable, description="CPU time of a rank's loop")
    costs: str | None = Field(
        None, description="Profile file with fitted costs instead of costs from the hardware"
    )
    config: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Settings of the engine for all systems"
    )
    window: WindowTable = Field(default_factory=WindowTable, description="Of a whole run")
    quick: WindowTable | None = Field(None, description="The window of --quick")
    targets: TargetTable = Field(default_factory=TargetTable, description="For goodput")
    figures: dict[str, str] = Field(
        default_factory=dict,
        description='The result: name = "SYSTEM[@NAME…][:METRIC] [/ another]" or "1 - a / b"',
    )
    published: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="By workload: published values of these figures"
    )
    source: str = Field("", description="Where the published figures are from")
    notes: dict[str, str] = Field(
        default_factory=dict, description="By figure: why ours differs from the published one"
    )
    run_costs: bool = Field(
        False, description="Whether what the simulation itself cost is part of the result"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_without_a_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for single, plural in _PLURAL.items():
            if single in values:
                if plural in values:
                    raise ValueError(f"both {single} and {plural} are given; give one of them")
                values[plural] = {single: values.pop(single)}
        return values

    @model_validator(mode="after")
    def _names_are_told_apart(self) -> Self:
        seen: dict[str, str] = {}
        for dimension, names in self.dimensions().items():
            for name in names:
                if not name or any(sign in _NOT_IN_NAMES for sign in name):
                    raise ValueError(
                        f"a {dimension} is named {name!r}; names have no @, no : and no space"
                    )
                other = seen.setdefault(name, dimension)
                if other != dimension:
                    raise ValueError(f"{name!r} is a {other} and a {dimension}; names must differ")
        for workload, published in self.published.items():
            if workload not in self.workloads:
                raise UnknownName("workload in published", workload, self.workloads)
            for name in published:
                if name not in self.all_figures:
                    raise UnknownName(f"figure in published.{workload}", name, self.all_figures)
        return self

    @property
    def all_figures(self) -> dict[str, str]:
        """`figures`; without any, the throughput of each system."""
        return self.figures or {f"{name}_tok_s": name for name in self.systems}

    def dimensions(self) -> dict[str, list[str]]:
        """What a run is made for every combination of: names, by dimension, in order."""
        return {single: list(getattr(self, plural)) for single, plural in _PLURAL.items()}


def load(path: Path) -> Experiment:
    """The experiment in a file. Raises `ConfigError` naming the key, its value and what may be."""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise ConfigError(f"experiment {path} is longer than {FILE_BYTES} bytes")
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"experiment {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"experiment {path} is not TOML: {error}") from None
    return checked(values, str(path), strict=True)


def checked(values: Mapping[str, Any], where: str, *, strict: bool = False) -> Experiment:
    """`values` as an experiment, which comes from `where`. Raises as `load`.

    `strict`: "2" is no number, and 1 is not true.
    """
    try:
        return Experiment.model_validate(values, strict=strict)
    except ValidationError as error:
        # A wrong name first: what is missing may be what it was meant for.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        place = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            known = _keys_at(Experiment, first["loc"][:-1])
            raise UnknownName(f"key in {where}", ".".join(place), known) from None
        message = first["msg"].removeprefix("Value error, ")
        if not place:
            raise ConfigError(f"{where}: {message}") from None
        if first["type"] == "missing":
            raise ConfigError(f"{where}: {'.'.join(place)} is missing") from None
        shown = f" is {first['input']!r}" if not isinstance(first["input"], dict) else ""
        raise ConfigError(f"{where}: {'.'.join(place)}{shown}: {message}") from None


def _keys_at(kind: type[BaseModel], place: Iterable[int | str]) -> list[str]:
    """The keys that may stand at a place of the tree, with the path to it."""
    path = ""
    here: type[BaseModel] = kind
    for part in place:
        path += f"{part}."
        if str(part) in here.model_fields:
            annotation = here.model_fields[str(part)].annotation
            here = next(
                (
                    option
                    for option in (annotation, *getattr(annotation, "__args__", ()))
                    if isinstance(option, type) and issubclass(option, BaseModel)
                ),
                Section,
            )
        # a name of a table's entry leads to the entry's own keys, which `here` is already
    singles = [*_PLURAL] if kind is here else []
    return [f"{path}{name}" for name in [*here.model_fields, *singles]]


def _given(table: Section, of: type[Any]) -> dict[str, Any]:
    """The values of `table` that are set and that `of` has."""
    known = {each.name for each in fields(of)} - {"name"}
    return {k: v for k, v in table.model_dump().items() if k in known and v is not None}


def _complete(what: str, values: Mapping[str, Any], of: type[Any], optional: set[str]) -> None:
    missing = [each.name for each in fields(of) if each.name not in {*values, *optional, "name"}]
    if missing:
        names = {"model": "shape", "cluster": "hardware"}
        raise ConfigError(
            f"{what} has no {', '.join(missing)}; give {names[what]} or all of its numbers"
        )
