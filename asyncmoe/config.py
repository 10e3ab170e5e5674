"""The one typed configuration tree. Every key has a type, a default and a meaning.

Sources, later ones win: defaults, a TOML file, the environment (`ASYNCMOE_SECTION__KEY`), flags
(`--section.key`). `asyncmoe config --explain` prints the tree. Loading is in `configfile.py`.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_MOST = 1 << 24  # of things that every rank keeps tables of


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are checked when they are set."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a socket that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ModelConfig(Section):
    """Which model, and how it is loaded."""

    name: str = Field("tiny", description="Built-in model name or checkpoint directory")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute and cache dtype; auto takes the checkpoint's own"
    )
    quantize: Literal["none", "int8"] = Field(
        "none",
        description="int8 keeps the weights of products in 8 bits, with a scale per output: half "
        "the memory of bfloat16; embedding, norms and routers stay as they are",
    )
    load_format: Literal["safetensors", "dummy"] = Field(
        "safetensors", description="dummy makes random weights from config.json alone"
    )
    seed: int = Field(0, ge=0, description="Seed of dummy weights and of made-up routing")
    routing: str = Field(
        "model",
        description="Which experts rows go to: model, which is its own router, or for experiments "
        "uniform, zipf:S, hot:EXPERTS,SHARE, replay:FILE",
    )
    record_routing: str | None = Field(
        None, description="Each rank writes its router's choices to FILE.rankN (Parquet)"
    )
    context: int | None = Field(
        None, ge=1, description="Longest sequence in tokens; default is the model's own"
    )
    strict: bool = Field(True, description="Refuse a checkpoint with parameters not expected")


class ClusterConfig(Section):
    """The ranks and how they meet."""

    ranks: int = Field(1, ge=1, le=65535, description="Number of ranks (processes)")
    bind_host: str = Field("127.0.0.1", description="Address that a rank's sockets bind to")
    token: str = Field(
        "",
        repr=False,
        description="Secret that ranks prove to each other; made up for ranks started locally, "
        "required when bind_host is not loopback",
    )
    start_timeout_s: float = Field(120.0, gt=0, description="Longest start-up, loading included")
    peer_timeout_s: float = Field(
        30.0, gt=0, description="A rank that is silent for this long is taken as dead"
    )
    shutdown_timeout_s: float = Field(
        4.0, gt=0, description="Longest orderly end before processes are killed"
    )

    @model_validator(mode="after")
    def _other_machines_need_a_secret(self) -> Self:
        if not self.token and not is_loopback(self.bind_host):
            raise ValueError(
                f"cluster.bind_host {self.bind_host!r} can be reached from other machines, so "
                "cluster.token must be set to the same secret on every rank"
            )
        return self


class PlacementConfig(Section):
    """Roles of the ranks and placement of experts."""

    roles: list[Literal["attention", "expert", "both"]] | None = Field(
        None, description="One per rank; default both"
    )
    attention_ranks: int | None = Field(
        None,
        ge=1,
        description="The first so many ranks do attention alone and all others experts alone; "
        "default as roles says",
    )
    experts_per_rank: list[int] | None = Field(
        None, description="Experts of each rank, in order; default as even as possible"
    )
    file: str | None = Field(
        None, description='JSON file {"roles": [...], "owner": [[rank of each expert] per layer]}'
    )
    profile: str | None = Field(
        None,
        description="Balance the experts' load over the ranks: FILE of a recorded routing (bench "
        "--record-routing), or `routing` for that of model.routing",
    )


class TransportConfig(Section):
    """How parcels travel."""

    name: str | None = Field(None, description="Default: inproc for one rank, auto for several")
    parcel_bytes: int = Field(
        64 << 20, ge=4096, le=4 << 30, description="Largest payload of one parcel"
    )
    message_bytes: int = Field(
        16 << 20, ge=1 << 20, le=1 << 30, description="Largest control message"
    )
    window_rows: int = Field(
        4096,
        ge=1,
        le=_MOST,
        description="Rows that an expert rank holds for one home rank (credits)",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the transport itself"
    )


class SchedulerConfig(Section):
    """Which rule picks the next stage."""

    name: str = Field("defrag_aging", description="Registered name or path.py:Class")
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of the rule; see its documentation"
    )


_LINGER = "A stage below its minimum runs anyway once its oldest row has waited this long"


class BatchConfig(Section):
    """The batch policy: how many rows of a chosen stage run at once, and when a stage may run."""

    attention_max_rows: int = Field(512, ge=1, description="Most rows of an attention batch")
    expert_max_rows: int = Field(4096, ge=1, description="Most rows of an expert batch")
    head_max_rows: int = Field(512, ge=1, description="Most rows of a head batch")
    attention_min_rows: int = Field(1, ge=1, description="Rows for which an attention stage waits")
    expert_min_rows: int = Field(1, ge=1, description="Rows for which an expert stage waits")
    head_min_rows: int = Field(1, ge=1, description="Rows for which the head stage waits")
    attention_linger_ms: float = Field(2.0, ge=0, description=_LINGER)
    expert_linger_ms: float = Field(2.0, ge=0, description=_LINGER)
    head_linger_ms: float = Field(2.0, ge=0, description=_LINGER)
    company: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="How many times the compute of a batch a stage waits for rows that are known "
        "to be on their way to it; 0: it does not; default 2 where there are several live ranks",
    )

    @property
    def has_minima(self) -> bool:
        """Whether stages of some kind wait for a number of rows."""
        return max(self.attention_min_rows, self.expert_min_rows, self.head_min_rows) > 1

    @model_validator(mode="after")
    def _company_or_minima(self) -> Self:
        if self.company and self.has_minima:
            raise ValueError(
                f"batch.company is {self.company:g}, but a batch.*_min_rows is above 1: stages "
                "wait for rows on their way or for a number of rows, not for both"
            )
        return self

    @model_validator(mode="after")
    def _minimum_fits_maximum(self) -> Self:
        for kind in ("attention", "expert", "head"):
            least, most = getattr(self, f"{kind}_min_rows"), getattr(self, f"{kind}_max_rows")
            if least > most:
                raise ValueError(
                    f"batch.{kind}_min_rows is {least}, above batch.{kind}_max_rows, {most}"
                )
        return self


class KvConfig(Section):
    """The paged KV cache of a home rank."""

    block_tokens: int = Field(16, ge=1, le=1024, description="Tokens of a KV block")
    blocks: int | None = Field(None, ge=1, description="Blocks of the pool; default by memory_gib")
    memory_gib: float = Field(1.0, gt=0, description="Size of the pool when blocks is not set")


class EngineConfig(Section):
    """Requests and their rows."""

    combine: Literal["per_rank", "per_expert"] = Field(
        "per_rank", description="Combine rows per expert rank (fewest bytes) or per expert"
    )
    prefill_chunk: int = Field(
        256, ge=1, le=_MOST, description="Most positions of one prefill chunk"
    )
    max_requests: int = Field(
        256, ge=1, le=_MOST, description="Requests in the layers at once, per home"
    )
    queue_requests: int = Field(
        4096,
        ge=1,
        le=_MOST,
        description="Requests that wait for admission, per home; more are refused",
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="A request that takes longer ends with an error; default never"
    )
    slots: int = Field(
        2048, ge=1, le=_MOST, description="Token slots (rows in the layers) per home rank"
    )
    marches: bool = Field(
        True,
        description="Ranks of one machine take greedy decode steps together while they have "
        "nothing else to do, past queues and scheduler; off where these are what is studied",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest answer of a request without max_tokens, whose KV blocks are reserved; "
        "default as the context allows, up to a quarter of the KV pool",
    )


class DeviceConfig(Section):
    """The compute device of a rank."""

    name: str = Field("cpu", description="Registered device")
    threads: int | None = Field(
        None, ge=1, description="Compute threads of a rank; default cores / local ranks"
    )
    depth: int = Field(
        2,
        ge=1,
        le=2,
        description="Batches with the device at once; with 1 nothing of the loop's work on a batch "
        "is done while another computes (for experiments)",
    )
    pin: bool = Field(
        True, description="Keep the compute threads of several ranks of a machine on own cores"
    )


class ServerConfig(Section):
    """The HTTP server."""

    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    served_name: str | None = Field(None, description="Model name in the API; default model.name")
    body_bytes: int = Field(8 << 20, ge=1024, description="Largest request body")


class MetricsConfig(Section):
    """What is measured beside the counters that every rank keeps."""

    probe_period_s: float | None = Field(
        None,
        gt=0,
        description="Sample queue depths and gauges this often (the period grows in long runs) and "
        "count batch sizes and waits; default not at all",
    )


class LogConfig(Section):
    """Logging, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Log level")


class Config(Section):
    """All of it."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    transport: TransportConfig = Field(default_factory=TransportConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    kv: KvConfig = Field(default_factory=KvConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    log: LogConfig = Field(default_factory=LogConfig)
