"""How long things take in the virtual world: a step on the device, and the Python around it.

A step takes `fixed_s`, plus the greater of its memory traffic (rows, KV tokens, distinct experts,
each with its seconds) and its arithmetic (rows or, for experts, pairs). The coefficients follow
from a model's shape and stated figures of hardware (`derived`), or from a profile of a live run
(`load`). A rank's host is serial: its loop works `before_s` on a step before the device begins,
`after_s` once it is done, and on each parcel and message. How much of that is hidden behind compute
is not stated: it comes out of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from asyncmoe.errors import ConfigError
from asyncmoe.stage import Kind
from asyncmoe.steps import AttentionStep, ExpertStep, HeadStep
from asyncmoe.virtual.shapes import Hardware, ModelShape


@dataclass(frozen=True, slots=True)
class KindCost:
    """Coefficients of one kind of stage. All are seconds."""

    fixed_s: float = 0.0
    row_s: float = 0.0  # memory traffic of a row
    kv_token_s: float = 0.0  # attention: of a token of a row's context
    windowed_kv_token_s: float = 0.0  # likewise, of the last `window` tokens alone
    expert_s: float = 0.0  # experts: the weights of one that any row chose
    flop_row_s: float = 0.0  # arithmetic of a row; of experts that of a pair
    wire_row_s: float = 0.0  # of a row, beside all others: what devices of one rank exchange
    before_s: float = 0.0  # of the host
    after_s: float = 0.0  # of the host


class StepCost(NamedTuple):
    """What one step takes."""

    before_s: float
    compute_s: float
    after_s: float


NOTHING = StepCost(0.0, 0.0, 0.0)


class Costs(Protocol):
    """What devices and transports of the virtual world ask. Equal for equal arguments, or drawn
    from a generator of the rank's own."""

    @property
    def parcel_out_s(self) -> float:
        """Of the sender's host, for a parcel."""

    @property
    def parcel_in_s(self) -> float:
        """Of the receiver's host, for a parcel."""

    @property
    def message_s(self) -> float:
        """Of the hosts at both ends, for a control message."""

    def of(self, work: Callable[[], Any]) -> StepCost:
        """Of a piece of device work; what is no step takes no time."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """See the module. Implements `Costs`."""

    attention: KindCost = KindCost()
    expert: KindCost = KindCost()
    head: KindCost = KindCost()
    first_layer: KindCost | None = None  # of A0, where dense layers stand before the others
    window: int = 0  # see `KindCost.windowed_kv_token_s`
    parcel_out_s: float = 0.0  # of the sender's host
    parcel_in_s: float = 0.0  # of the receiver's
    message_s: float = 0.0  # a control message, of each of both

    def of(self, work: Callable[[], Any]) -> StepCost:
        """See `Costs`."""
        match work:
            case ExpertStep():
                row, _, counts, _, _ = work.columns
                cost, pairs = self.expert, len(row)
                touched = int(np.count_nonzero(counts))
                memory_s = work.row_count * cost.row_s + touched * cost.expert_s
                busy_s = max(memory_s, pairs * cost.flop_row_s)
            case AttentionStep():
                cost = self.attention
                if work.layer == 0 and self.first_layer is not None:
                    cost = self.first_layer
                memory_s = work.row_count * cost.row_s + self._reading_s(work, cost)
                busy_s = max(memory_s, work.row_count * cost.flop_row_s)
            case HeadStep():
                cost, rows = self.head, len(work.sampled_segments)
                busy_s = rows * max(cost.row_s, cost.flop_row_s)
            case _:
                return NOTHING
        compute_s = cost.fixed_s + busy_s + work.row_count * cost.wire_row_s
        return StepCost(cost.before_s, compute_s, cost.after_s)

    def _reading_s(self, work: AttentionStep, cost: KindCost) -> float:
        """Of the cache: a decode row reads its context, a chunk reads it once for all its rows."""
        seconds = 0.0
        if cost.kv_token_s:
            seconds = int(work.rows.columns.context.sum()) * cost.kv_token_s
        if cost.windowed_kv_token_s:
            seen = np.minimum(work.rows.columns.context, self.window).sum()
            seconds += int(seen) * cost.windowed_kv_token_s
        return seconds


@dataclass(slots=True)
class ScatteredCosts:
    """Costs without a meaning, drawn from a seed: for tests that look for rare interleavings."""

    seed: str
    least_s: float = 1e-5
    most_s: float = 1e-3
    parcel_out_s: float = 0.0
    parcel_in_s: float = 0.0
    message_s: float = 0.0
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def of(self, work: Callable[[], Any]) -> StepCost:
        """See `Costs`."""
        if not isinstance(work, AttentionStep | ExpertStep | HeadStep):
            return NOTHING
        return StepCost(0.0, self._random.uniform(self.least_s, self.most_s), 0.0)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """CPU seconds of a rank's loop, as measured or published."""

    attention_s: float = 0.0  # per step, in all
    expert_s: float = 0.0
    head_s: float = 0.0
    before_share: float = 0.5  # of a step's, that which comes before the device can begin
    parcel_out_s: float = 0.0
    parcel_in_s: float = 0.0
    message_s: float = 0.0


def derived(shape: ModelShape, hardware: Hardware, host: HostCosts = HostCosts()) -> CostModel:
    """Costs of `shape` on `hardware` by its stated figures."""
    byte_s = 1 / (hardware.memory_bytes_per_s * hardware.memory_share)
    flop_s = 1 / (hardware.flop_per_s * hardware.flop_share)
    weight_s, row_s = shape.value_bytes * byte_s, 4 * shape.row_bytes * byte_s
    kv_s = shape.kv_bytes * byte_s
    full = 1.0 if shape.window is None else 1 - shape.windowed_share

    def kind(weights: int, host_s: float, **more: float) -> KindCost:
        before_s = host_s * host.before_share
        return KindCost(
            fixed_s=hardware.launch_s + more.pop("read", 1.0) * weights * weight_s,
            row_s=row_s,
            flop_row_s=2 * weights * flop_s,
            before_s=before_s,
            after_s=host_s - before_s,
            **more,
        )

    attention = kind(
        shape.attention_weights,
        host.attention_s,
        kv_token_s=full * kv_s,
        windowed_kv_token_s=(1 - full) * kv_s,
    )
    dense = shape.dense_layers
    first = replace(
        attention,
        fixed_s=attention.fixed_s + dense * shape.dense_weights * weight_s,
        flop_row_s=attention.flop_row_s + 2 * dense * shape.dense_weights * flop_s,
        kv_token_s=attention.kv_token_s * (1 + dense),
        windowed_kv_token_s=attention.windowed_kv_token_s * (1 + dense),
    )
    return CostModel(
        attention=attention,
        expert=kind(
            shape.expert_weights, host.expert_s, read=0.0, expert_s=shape.expert_weights * weight_s
        ),
        head=kind(shape.head_weights, host.head_s),
        first_layer=first if dense else None,
        window=shape.window or 0,
        parcel_out_s=host.parcel_out_s,
        parcel_in_s=host.parcel_in_s,
        message_s=host.message_s,
    )


def dump(costs: CostModel) -> bytes:
    """As JSON, for a profile file."""
    return orjson.dumps(costs, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


def load(path: Path) -> CostModel:
    """What `dump` wrote. Raises `ConfigError` naming the file and what is wrong."""
    try:
        values = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cost profile {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"cost profile {path} is not a map")
    kinds = {kind.name.lower() for kind in Kind} | {"first_layer"}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name in kinds and value is not None:
            checked[name] = KindCost(**_seconds(value, KindCost, f"{path}: {name}"))
        else:
            checked[name] = value
    plain = {name: value for name, value in checked.items() if name not in kinds}
    _seconds(plain, CostModel, str(path))
    return CostModel(**checked)


def _seconds(values: Any, of: type[Any], where: str) -> Mapping[str, float]:
    """`values` if they are numbers from 0 on, of fields that there are."""
    known = {each.name for each in fields(of)}
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is not a map")
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where}.{name} is unknown; known: {', '.join(sorted(known))}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{where}.{name} is {value!r}; allowed: a number from 0 on")
    return values
