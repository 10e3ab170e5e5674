"""What UCX is started with: the transport's options, UCX's own environment, and our defaults."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.reach import WILDCARDS
from asyncmoe.transport import TransportContext

# UCX's own default, 8 KiB, costs TCP half of its throughput.
_SEGMENT_BYTES, _FEWEST_SEGMENT_BYTES, _MOST_SEGMENT_BYTES = 128 << 10, 4 << 10, 1 << 20
# From here a payload waits at the sender until its receive is posted: what comes before lies in
# memory of UCX, and is copied once more.
_RNDV_THRESH = "8192"
_TLS = {"cpu": "tcp,self", "cuda": "tcp,self,cuda_copy,cuda_ipc"}
_SIOCGIFADDR = 0x8915  # the first IPv4 address of a network device, see netdevice(7)
_IF_INET6 = Path("/proc/net/if_inet6")
_RDMA = Path("/sys/class/infiniband")
_DEVICES_VARIABLE, _TLS_VARIABLE = "UCX_NET_DEVICES", "UCX_TLS"


async def config_of(context: TransportContext) -> dict[str, str]:
    """Options of UCX, without their prefix. What the environment sets and no option does is left
    to UCX. Raises `ConfigError` naming the option."""
    options = context.options
    tls, devices = _text(options, "tls"), _text(options, "net_devices")
    segment = str(_segment_bytes(options))
    defaults = {
        "TLS": _TLS[context.device.type],
        "RNDV_THRESH": _RNDV_THRESH,
        "MAX_RNDV_RAILS": "1",
        "TCP_TX_SEG_SIZE": segment,
        "TCP_RX_SEG_SIZE": segment,
    }
    if context.device.type == "cuda":
        defaults["RNDV_FRAG_MEM_TYPES"] = "cuda"
    config = {name: value for name, value in defaults.items() if f"UCX_{name}" not in os.environ}
    if "segment_bytes" in options:
        config |= {"TCP_TX_SEG_SIZE": segment, "TCP_RX_SEG_SIZE": segment}
    if tls is not None:
        config["TLS"] = tls
    if devices is not None:
        _check_devices("transport.options.net_devices", devices)
        config["NET_DEVICES"] = devices
    elif _DEVICES_VARIABLE not in os.environ and context.bind_host not in WILDCARDS:
        config["NET_DEVICES"] = await _device_of(context.bind_host)
    else:
        check_environment()
    return config


def chosen_tls(context: TransportContext) -> tuple[str, str] | None:
    """The setting that chooses UCX's transports, and its value; None where that is our default."""
    if "tls" in context.options:
        return "transport.options.tls", str(context.options["tls"])
    if _TLS_VARIABLE in os.environ:
        return _TLS_VARIABLE, os.environ[_TLS_VARIABLE]
    return None


def check_environment() -> None:
    """Raise `ConfigError` if UCX's variable for its network devices names one that is not here."""
    devices = os.environ.get(_DEVICES_VARIABLE)
    if devices is not None:
        _check_devices(_DEVICES_VARIABLE, devices)


def _check_devices(setting: str, devices: str) -> None:
    """UCX would only warn, and later reach nobody."""
    known = _network_devices()
    for pattern in devices.removeprefix("^").split(","):
        if pattern != "all" and not any(fnmatch(name, pattern) for name in known):
            raise ConfigError(
                f"{setting} is {devices!r}, and this machine has no network device {pattern!r}; "
                f"allowed: all, {', '.join(known)}"
            )


def _network_devices() -> list[str]:
    """As UCX takes them: interfaces, and RDMA devices with and without a port."""
    ports = [f"{port.parts[-3]}:{port.name}" for port in _RDMA.glob("*/ports/*")]
    rdma = [device.name for device in _RDMA.glob("*")]
    return sorted([*(name for _, name in socket.if_nameindex()), *rdma, *ports])


def _text(options: dict[str, Any], name: str) -> str | None:
    value = options.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"transport.options.{name} is {value!r}; allowed: text, as UCX takes it")
    return value


def _segment_bytes(options: dict[str, Any]) -> int:
    value = options.get("segment_bytes", _SEGMENT_BYTES)
    if type(value) is not int or not _FEWEST_SEGMENT_BYTES <= value <= _MOST_SEGMENT_BYTES:
        raise ConfigError(
            f"transport.options.segment_bytes is {value!r}; "
            f"allowed: {_FEWEST_SEGMENT_BYTES} to {_MOST_SEGMENT_BYTES}, whole"
        )
    return value


async def _device_of(host: str) -> str:
    """The network device that has this address, so that UCX listens where the links do."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cluster.bind_host {host!r} has no address: {error}") from error
    address = ip_address(str(found[0][4][0]).partition("%")[0])
    for name, of_device in _addresses():
        if of_device == address or (address.is_loopback and of_device.is_loopback):
            return name
    raise ConfigError(
        f"no network device has the address {address} of cluster.bind_host {host!r}; "
        "name one in transport.options.net_devices"
    )


def _addresses() -> Iterator[tuple[str, Any]]:
    """Network devices and their addresses: the first of IPv4, all of IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # a device without an address
                record = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, ip_address(record[20:24])
    with suppress(OSError):
        for line in _IF_INET6.read_text().splitlines():
            fields = line.split()
            yield fields[-1], ip_address(bytes.fromhex(fields[0]))
