"""Where weights come from: a Hugging Face checkpoint directory, read lazily, or made-up numbers.

`open_checkpoint` finds a model by name or directory and says which class runs it; a rank then reads
only the tensors that its placement needs. Tensors are never unpickled: safetensors files only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncmoe import registry
from asyncmoe.config import ModelConfig
from asyncmoe.errors import CheckpointError, ConfigError, RequestError, UnknownName
from asyncmoe.model import LoadPlan, Model, ModelSpec
from asyncmoe.sampling import SamplingParams

BUILT_IN = Path(__file__).parent / "models"  # the built-in model NAME lies in the folder NAME
SAMPLE_BYTES = 4096  # of each file, to tell checkpoints apart
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Buffers that old checkpoints saved along with the parameters.
_BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")


class WeightSource(ABC):
    """Parameters by name. Use it as a context manager, or call `close`."""

    def __init__(self) -> None:
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Let every `read` from now on, on any thread, raise `CheckpointError`. For an end that
        comes while a thread loads."""
        self._given_up.set()

    def _go_on(self) -> None:
        """To be called by each `read`."""
        if self._given_up.is_set():
            raise CheckpointError("loading was given up")

    @abstractmethod
    def identity(self) -> str:
        """A short text that differs between sources of different numbers, found without reading
        them all: equal text is no proof, but mistaken files differ."""

    @abstractmethod
    def expect(self, required: Iterable[str], optional: Collection[str] = ()) -> None:
        """Check that the source holds all of `required`, and nothing else but `optional`.

        `required` names the whole model, other ranks' experts included. Nothing is read.
        Raises `CheckpointError` with the names.
        """

    @abstractmethod
    def read(self, name: str, shape: tuple[int, ...], rows: slice | None = None) -> Tensor:
        """The parameter, or some rows of its first dimension, in the checkpoint's own dtype.

        `shape` is that of the whole parameter. The memory is the caller's. Raises
        `CheckpointError` for a missing parameter, a wrong shape, a dtype that is not a float, and
        after `give_up`.
        """

    def close(self) -> None:  # noqa: B027 - not every source holds files
        """Close the files. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a safetensors file."""

    dtype: str  # as the format spells it
    shape: tuple[int, ...]
    begin: int  # of its numbers, in bytes from the beginning of the file


def _read_header(path: Path) -> dict[str, _Stored]:
    """What a safetensors file holds: a JSON object behind its length, then the numbers."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    return {
        name: _Stored(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


class SafetensorsSource(WeightSource):
    """`model.safetensors`, or the shards named in `model.safetensors.index.json`.

    A file's contents are listed when the first of its tensors is asked for, and it stays open from
    the first read to `close`. `strict` False lets parameters that
    the model does not expect pass.
    """

    def __init__(self, directory: Path, *, strict: bool = True) -> None:
        super().__init__()
        self.directory, self.strict = directory, strict
        self._files: dict[str, FileIO] = {}  # those that were read from, by name
        self._tensors: dict[str, dict[str, _Stored]] = {}  # by file name and parameter
        self._stack = ExitStack()
        self._file_of = self._locate()

    def _locate(self) -> dict[str, str]:
        """File of every parameter. Raises `CheckpointError` for a file that is not there."""
        index = self.directory / INDEX
        if not index.is_file():
            if not (self.directory / WEIGHTS).is_file():
                raise CheckpointError(f"{self.directory} has neither {WEIGHTS} nor {INDEX}")
            return dict.fromkeys(self._contents(WEIGHTS), WEIGHTS)
        file_of = _read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
            raise CheckpointError(f"{index}: weight_map must map parameter names to file names")
        for file in sorted(set(file_of.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{index}: {file!r} is not a plain file name")
            if not (self.directory / file).is_file():
                names = [name for name, at in file_of.items() if at == file]
                raise CheckpointError(
                    f"{self.directory}: shard {file} is named in {INDEX} but missing; "
                    f"it should hold {_listed(names)}"
                )
        return file_of

    def _contents(self, file: str) -> dict[str, _Stored]:
        if file not in self._tensors:
            path = self.directory / file
            try:
                with safe_open(path, framework="pt"):  # checks the header against the file
                    self._tensors[file] = _read_header(path)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is not a readable safetensors file: {error}"
                ) from error
        return self._tensors[file]

    def expect(self, required: Iterable[str], optional: Collection[str] = ()) -> None:
        wanted = set(required)
        if missing := sorted(wanted - self._file_of.keys()):
            hint = self._layers_hint(wanted)
            raise CheckpointError(f"{self.directory}: missing parameters: {_listed(missing)}{hint}")
        extra = self._file_of.keys() - wanted - set(optional)
        extra = {name for name in extra if not _BUFFERS.search(name)}
        if extra and self.strict:
            raise CheckpointError(
                f"{self.directory}: unexpected parameters: {_listed(sorted(extra))}"
                f"{self._layers_hint(wanted)}; model.strict = false ignores them"
            )

    def _layers_hint(self, wanted: Iterable[str]) -> str:
        asked, held = _layer_count(wanted), _layer_count(self._file_of)
        if asked == held:
            return ""
        return f"; config.json asks for {asked} layers, the checkpoint has {held}"

    def identity(self) -> str:
        """From each file's name, size and last bytes, which are numbers of some parameter."""
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(set(self._file_of.values())):
            try:
                with (self.directory / name).open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - SAMPLE_BYTES))
                    digest.update(f"{name}/{size}/".encode() + file.read(SAMPLE_BYTES))
            except OSError as error:
                raise CheckpointError(f"{self.directory / name} cannot be read: {error}") from error
        return f"safetensors {digest.hexdigest()}"

    def read(self, name: str, shape: tuple[int, ...], rows: slice | None = None) -> Tensor:
        self._go_on()
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory}: missing parameter {name}")
        stored = self._contents(file).get(name)
        if stored is None:
            raise CheckpointError(
                f"{self.directory / file} does not hold {name}, which {INDEX} places there"
            )
        if stored.shape != shape:
            raise CheckpointError(
                f"{self.directory / file}: {name} has shape {list(stored.shape)}; "
                f"config.json asks for {list(shape)}"
            )
        dtype = _FLOATS.get(stored.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.directory / file}: {name} has dtype {stored.dtype}; "
                f"allowed: {', '.join(_FLOATS)}"
            )
        return self._read_rows(file, stored, dtype, rows)

    def _read_rows(
        self, file: str, stored: _Stored, dtype: torch.dtype, rows: slice | None
    ) -> Tensor:
        """Read into memory of its own. A mapped file's pages would all count as this process's
        memory until the end of the load, which would so need twice the weights."""
        shape, begin = stored.shape, stored.begin
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            begin += first * math.prod(shape[1:]) * dtype.itemsize
            shape = (last - first, *shape[1:])
        if file not in self._files:
            self._files[file] = self._stack.enter_context(FileIO(self.directory / file))
        tensor = torch.empty(shape, dtype=dtype)
        left: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
        while left:
            count = os.preadv(self._files[file].fileno(), [left], begin)
            if count == 0:
                raise CheckpointError(f"{self.directory / file} was cut off while it was read")
            left, begin = left[count:], begin + count
        return tensor

    def close(self) -> None:
        self._files.clear()
        self._stack.close()


class DummySource(WeightSource):
    """Random weights that depend on name, shape and seed alone, so that all ranks agree on them.

    Matrices are normal with standard deviation `std`, norm weights are one, biases zero.
    """

    def __init__(self, *, seed: int = 0, std: float = 0.02) -> None:
        super().__init__()
        self.seed, self.std = seed, std

    def expect(self, required: Iterable[str], optional: Collection[str] = ()) -> None:
        """There is nothing to check: any name can be made up."""

    def identity(self) -> str:
        return f"dummy seed={self.seed} std={self.std:g}"

    def read(self, name: str, shape: tuple[int, ...], rows: slice | None = None) -> Tensor:
        self._go_on()
        if name.endswith("norm.weight"):
            whole = torch.ones(shape)
        elif name.endswith(".bias"):
            whole = torch.zeros(shape)
        else:
            key = f"{self.seed}/{name}/{shape}".encode()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            whole = torch.randn(shape, generator=generator) * self.std
        return whole if rows is None else whole[rows].clone()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that was found: what it is, which class runs it, and what to read it from.

    Every rank opens its own, with the same configuration.
    """

    directory: Path
    config: Mapping[str, Any]  # config.json
    model_class: type[Model]
    spec: ModelSpec  # with the EOS ids of generation_config.json
    source: WeightSource
    sampling_defaults: Mapping[
        str, float | int
    ]  # of generation_config.json; keys SAMPLING_DEFAULTS

    def load(self, plan: LoadPlan, device: torch.device) -> Model:
        """Read what `plan` asks for and close the files. See `Model.load`."""
        with self.source:
            return self.model_class.load(self.config, self.spec, self.source, plan, device)


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """Find a model by built-in name or directory and read its configuration, but no weights.

    Raises `CheckpointError` if files are missing or damaged, `UnknownName` for an architecture that
    nothing is registered for, `ConfigError` for a config value that is not supported.
    """
    directory = find_directory(config.name)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json")
    settings = _read_json(directory / "config.json")
    model_class = registry.find("models", _architecture(settings))
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    spec = model_class.read_spec(settings, dtype)
    if config.context is not None:
        if config.context > spec.context:
            raise ConfigError(
                f"model.context is {config.context}; the model's own, {spec.context}, is the most"
            )
        spec = replace(spec, context=config.context)
    _check_eos(directory / "config.json", spec)
    generation = _read_generation(directory)
    eos = generation.get("eos_token_id")
    if eos is not None:
        spec = replace(spec, eos_ids=tuple(eos) if isinstance(eos, list) else (eos,))
        _check_eos(directory / "generation_config.json", spec)
    spec = replace(spec, quantize=config.quantize == "int8")
    source: WeightSource
    if config.load_format == "dummy":
        source = DummySource(seed=config.seed, std=settings.get("initializer_range") or 0.02)
    else:
        source = SafetensorsSource(directory, strict=config.strict)
    defaults = {key: generation[key] for key in _wished(generation)}
    return Checkpoint(directory, settings, model_class, spec, source, defaults)


def find_directory(name: str) -> Path:
    """The directory of a built-in model or of a checkpoint.

    Raises `UnknownName`, or `CheckpointError` if the name looks like a path.
    """
    known = sorted(p.parent.name for p in BUILT_IN.glob("*/config.json"))
    if name in known:  # before directories: an unrelated ./tiny must not hide the built-in model
        return BUILT_IN / name
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file; allowed: the directory of a checkpoint")
    if len(path.parts) > 1:
        raise CheckpointError(f"there is no directory {path}")
    raise UnknownName("model", name, known)


def _architecture(config: Mapping[str, Any]) -> str:
    """Registered name of the config's architecture: its `model_type`, else from `architectures`."""
    known = registry.names("models")
    name = config.get("model_type")
    if name is None:
        classes = config.get("architectures") or [""]
        stem = str(classes[0]).removesuffix("ForCausalLM")
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()
    if name not in known:
        raise UnknownName("architecture", str(name), known)
    return str(name)


def _check_eos(path: Path, spec: ModelSpec) -> None:
    for token in spec.eos_ids:
        if not 0 <= token < spec.vocab:
            raise ConfigError(
                f"{path}: eos_token_id is {token}; "
                f"allowed: ids from 0 and below the vocabulary size, {spec.vocab}"
            )


def _read_generation(directory: Path) -> dict[str, Any]:
    """generation_config.json, or {} if there is none."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    generation = _read_json(path)
    eos = generation.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{path}: eos_token_id is {eos!r}; allowed: a token id or a list of them")
    for key in SAMPLING_DEFAULTS:
        value = generation.get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ConfigError(f"{path}: {key} is {value!r}; allowed: a finite number")
    try:
        SamplingParams(**{key: generation[key] for key in _wished(generation)})
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    return generation


def _wished(generation: Mapping[str, Any]) -> list[str]:
    """The sampling fields that generation_config.json sets."""
    return [key for key in SAMPLING_DEFAULTS if generation.get(key) is not None]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _layer_count(names: Iterable[str]) -> int:
    """Number of decoder layers that parameter names speak of."""
    found = (re.search(r"\.layers\.(\d+)\.", name) for name in names)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _listed(names: list[str], most: int = 4) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
