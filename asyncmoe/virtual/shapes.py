"""What is simulated, in figures: shapes of published models, and hardware as makers state it."""

from __future__ import annotations

from dataclasses import dataclass

from asyncmoe.errors import UnknownName


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that time and traffic follow from."""

    name: str
    layers: int  # decoder layers, dense ones included
    hidden: int
    experts: int
    top_k: int
    expert_intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    shared_experts: int = 0
    dense_layers: int = 0  # the first ones, which have no experts
    dense_intermediate: int = 0
    window: int | None = None  # positions that a windowed layer looks back
    windowed_share: float = 0.0  # of the layers
    value_bytes: int = 2  # of a weight, an activation and a cache entry

    @property
    def moe_layers(self) -> int:
        """Layers with experts: the layers of the stage chain."""
        return self.layers - self.dense_layers

    @property
    def row_bytes(self) -> int:
        """A row on the wire."""
        return self.hidden * self.value_bytes

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention, router and shared experts."""
        width = 2 * (self.query_heads + self.kv_heads) * self.head_dim
        shared = 3 * self.shared_experts * self.expert_intermediate
        return self.hidden * (width + self.experts + shared)

    @property
    def dense_weights(self) -> int:
        """Weights of a dense layer: attention and feed-forward."""
        width = 2 * (self.query_heads + self.kv_heads) * self.head_dim
        return self.hidden * (width + 3 * self.dense_intermediate)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def head_weights(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Cache of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.value_bytes


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and its host's NIC, by their datasheets, and what of that is reached."""

    name: str
    flop_per_s: float  # dense, at the model's dtype
    memory_bytes_per_s: float
    memory_bytes: float
    ranks_per_host: int
    nic_bytes_per_s: float  # of a host, each way
    local_bytes_per_s: float  # between two devices of a host
    flop_share: float = 0.6  # of the peak that large products reach
    memory_share: float = 0.8  # of the bandwidth that reading weights and caches reaches
    launch_s: float = 20e-6  # a step's kernels beyond what their work takes


def _by_name(*shapes: ModelShape) -> dict[str, ModelShape]:
    return {shape.name: shape for shape in shapes}


MODELS = _by_name(
    ModelShape(
        "gpt-oss-120b", 36, 2880, 128, 4, 2880, 64, 8, 64, 201088, window=128, windowed_share=0.5
    ),
    ModelShape(
        "glm-4.5-air", 46, 4096, 128, 8, 1408, 96, 8, 128, 151552,
        shared_experts=1, dense_layers=1, dense_intermediate=10944,
    ),
    ModelShape("qwen3-235b-a22b", 94, 4096, 128, 8, 1536, 64, 4, 128, 151936),
    ModelShape("qwen3-30b-a3b", 48, 2048, 128, 8, 768, 32, 4, 128, 151936),
    ModelShape("mixtral-8x7b", 32, 4096, 8, 2, 14336, 32, 8, 128, 32000),
)  # fmt: skip

HARDWARE = {
    # 2 × L40S a host on PCIe 4.0 ×16, one 200 Gbit/s NIC
    "l40s": Hardware("l40s", 362e12, 864e9, 48e9, 2, 25e9, 25e9),
    # 4 × A100-40GB a host with NVLink, one 200 Gbit/s NIC
    "a100-40gb": Hardware("a100-40gb", 312e12, 1555e9, 40e9, 4, 25e9, 300e9),
}


def find_model(name: str) -> ModelShape:
    """The shape by name. Raises `UnknownName`."""
    if name not in MODELS:
        raise UnknownName("model shape", name, MODELS)
    return MODELS[name]


def find_hardware(name: str) -> Hardware:
    """The hardware by name. Raises `UnknownName`."""
    if name not in HARDWARE:
        raise UnknownName("hardware", name, HARDWARE)
    return HARDWARE[name]
