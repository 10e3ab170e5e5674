"""All that is called of NCCL (by nccl4py) and CUDA: the one place that needs a GPU."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from asyncmoe.errors import ConfigError, MissingDependency, MissingHardware


class Communicator(Protocol):
    """What is used of `nccl.core.Communicator`."""

    def send(self, sendbuf: torch.Tensor, peer: int, *, stream: int) -> None:
        """Enqueue a send."""

    def recv(self, recvbuf: torch.Tensor, peer: int, *, stream: int) -> None:
        """Enqueue a receive."""

    def get_async_error(self) -> int:
        """The state of the last call and of what is under way."""

    def abort(self) -> None:
        """End everything, free everything."""


class Library:
    """Everything that is called of NCCL and CUDA."""

    def __init__(self, device: torch.device) -> None:
        """Raises `MissingDependency`, `MissingHardware`, `ConfigError`."""
        try:
            self._nccl: Any = importlib.import_module("nccl.core")
        except ImportError as error:
            raise MissingDependency("transport 'nccl'", "nccl4py", "nccl") from error
        if not torch.cuda.is_available():
            raise MissingHardware("transport nccl needs an NVIDIA GPU, and torch sees none")
        if device.type != "cuda":
            raise ConfigError(f"transport nccl moves GPU memory; device is {device}")
        if (index := device.index or 0) >= (count := torch.cuda.device_count()):
            raise MissingHardware(f"device is cuda:{index}, but there are {count} GPUs")
        self._device = device
        self.thread_blocks = torch.cuda.get_device_properties(device).multi_processor_count

    def enter(self) -> None:
        """Make the device this thread's own."""
        torch.cuda.set_device(self._device)

    def unique_id(self) -> bytes:
        """What the two ranks of a new communicator share."""
        return bytes(self._nccl.get_unique_id())

    def communicator(self, rank: int, unique_id: bytes, ctas: int) -> Communicator:
        """Begin to make a communicator of two; its state says when that is done."""
        config = self._nccl.NCCLConfig(blocking=False, min_ctas=1, max_ctas=ctas)
        identity = self._nccl.UniqueId.from_bytes(unique_id)
        made: Communicator = self._nccl.Communicator.init(2, rank, identity, config)
        return made

    def group(self) -> AbstractContextManager[None]:
        """A group of calls, launched at its end."""
        entered: AbstractContextManager[None] = self._nccl.group()
        return entered

    def stream(self) -> Any:
        """A new `torch.cuda.Stream`, before those that compute."""
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def computed(self) -> Any:
        """An event behind what was launched on the loop's own stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory: uint8 [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def reason(self, state: int) -> str:
        """A state in words."""
        return str(self._nccl.get_error_string(state))
