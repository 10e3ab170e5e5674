"""The compiled kernels, as Python calls them.

Arrays are addresses (`Tensor.data_ptr()`), which the caller has checked and keeps alive; sizes and
strides are in elements. Nothing here holds the GIL while it computes.
"""

from collections.abc import Callable

def set_threads(threads: int) -> None: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(name: str) -> None: ...
def packed_bytes(storage: int, columns: int, inputs: int) -> int: ...
def pack(
    weight: int,
    columns: int,
    inputs: int,
    storage: int,
    out: int,
    first: int = 0,
    step: int = 1,
) -> None: ...
def gated(activation: str, bf16: bool, x: int, rows: int, width: int, out: int) -> None: ...

class Linear:
    def __init__(
        self,
        storage: int,
        weight: int,
        scales: int,
        bias: int,
        columns: int,
        inputs: int,
        bf16_in: bool,
        bf16_out: bool,
        round: bool,
    ) -> None: ...
    def __call__(self, x: int, rows: int, stride: int, out: int) -> None: ...

class Experts:
    def __init__(
        self,
        storage: int,
        gate_up: int,
        gate_up_scales: int,
        down: int,
        down_scales: int,
        experts: int,
        hidden: int,
        width: int,
        activation: str,
        bf16: bool,
        round_products: bool,
    ) -> None: ...
    def __call__(
        self,
        x: int,
        rows: int,
        stride: int,
        pairs: int,
        row: int,
        weight: int,
        counts: int,
        gather: int,
        out_rows: int,
        gather_width: int,
        out: int,
    ) -> None: ...
    def routed(
        self,
        x: int,
        rows: int,
        stride: int,
        experts: int,
        weights: int,
        k: int,
        local: int,
        ids: int,
        out: int,
    ) -> None: ...

def norm(
    bf16: bool,
    x: int,
    y: int,
    sum: int,
    weight: int,
    out: int,
    rows: int,
    width: int,
    eps: float,
) -> None: ...
def merge(
    bf16: bool,
    residual: int,
    parts: int,
    slots: int,
    counts: int,
    out: int,
    rows: int,
    table_slots: int,
    max_parts: int,
    width: int,
) -> None: ...

class PagedRows:
    def __init__(
        self,
        rows: int,
        segments: int,
        decode_rows: int,
        cache_index: int,
        query_start: int,
        context_len: int,
        block_table: int,
        table_width: int,
        block_tokens: int,
    ) -> None: ...

class AttentionLayer:
    def __init__(
        self,
        bf16: bool,
        heads: int,
        kv_heads: int,
        dim: int,
        rotated: int,
        window: int,
        scale: float,
        clip: float,
        eps: float,
        q_norm: int,
        k_norm: int,
        head_norm: int,
        sinks: int,
    ) -> None: ...
    def __call__(
        self,
        rows: PagedRows,
        qkv: int,
        angle: int,
        out: int,
        keys: int,
        values: int,
        blocks: int,
        angles: int,
        angle_rows: int,
    ) -> None: ...

class Router:
    def __init__(
        self,
        bf16: bool,
        gate: int,
        bias: int,
        hidden: int,
        columns: int,
        experts: int,
        top_k: int,
        renormalise: bool,
        round: bool,
    ) -> None: ...
    def __call__(self, x: int, rows: int, experts: int, weights: int) -> None: ...

class HomeLayer:
    def __init__(
        self,
        norm: int,
        norm_eps: float,
        qkv: Linear,
        attention: AttentionLayer,
        out: Linear,
        router_norm: int,
        router_norm_eps: float,
        router: Router,
    ) -> None: ...
    def __call__(
        self,
        rows: PagedRows,
        x: int,
        angle: int,
        keys: int,
        values: int,
        blocks: int,
        angles: int,
        angle_rows: int,
        residual: int,
        hidden: int,
        experts: int,
        weights: int,
    ) -> None: ...

def likeliest(x: int, count: int) -> int: ...

class Tongue:
    def __init__(
        self, embedding: int, vocab: int, norm: int, norm_eps: float, head: Linear
    ) -> None: ...

class Walk:
    def __init__(
        self,
        tongue: Tongue,
        rows: PagedRows,
        positions: int,
        cache_index: int,
        context: int,
        ends: int,
        end_width: int,
        tokens: int,
        bad: int,
        seconds: int,
        seconds_width: int,
        counts: int,
        wanted: int,
        bell: int,
    ) -> None: ...
    def __call__(self, layers: Layers, memory: int, x: int, steps: int) -> tuple[int, int]: ...

class Layers:
    def __init__(self) -> None: ...
    def add(self, home: HomeLayer, experts: Experts) -> None: ...
    def __call__(
        self,
        rows: PagedRows,
        x: int,
        angle: int,
        first: int,
        count: int,
        memory: int,
        wanted: Callable[[], bool],
        out: int,
        seconds: int,
    ) -> int: ...
