"""Links between devices, and a model of the least time that all-reduce, all-gather and messages take over them.

A message takes a launch, a latency for each step, and its bytes over the bandwidth (Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005). The model has not been measured with this
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .device_spec import DeviceSpec

LinkKind = Literal["nvlink", "pcie", "ethernet"]
LINK_KINDS: tuple[LinkKind, ...] = ("nvlink", "pcie", "ethernet")


@dataclass(frozen=True, slots=True)
class LinkProtocol:
    """Protocol by which bytes are sent over a link.

    launch_s  seconds per operation
    step_s    seconds of latency for each of the messages that follow one another
    share     fraction of the bandwidth that is usable
    """

    launch_s: float
    step_s: float
    share: float


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """Link that joins devices of one kind.

    bandwidth    bytes/s of one device in each direction, as NCCL calculates with it, or for Ethernet as TCP's payload
    protocols    the first has the least latency but flags in half of its bytes; the second uses the full bandwidth
    max_devices  largest number of devices that it joins; None: any number
    sources      (figure, source) pairs; "uncertain" in a source means what it says
    """

    name: str
    kind: LinkKind
    bandwidth: float
    protocols: tuple[LinkProtocol, LinkProtocol]
    max_devices: int | None
    sources: tuple[tuple[str, str], ...]


def all_reduce_s(link: DeviceLink, ranks: int, nbytes: float) -> float:
    """Predicted seconds to all-reduce `nbytes` over ranks.

    It is the faster of a ring, and of one shot, where each rank sends everything to every other.
    """
    if ranks == 1:
        return 0.0
    rings = [
        _transfer_s(link, protocol, 2 * (ranks - 1), 2 * (ranks - 1) / ranks * nbytes) for protocol in link.protocols
    ]
    return min(*rings, _transfer_s(link, link.protocols[0], 1, (ranks - 1) * nbytes))


def all_gather_s(link: DeviceLink, ranks: int, nbytes: float) -> float:
    """Predicted seconds to all-gather `nbytes` in total over ranks by a ring; at first each rank has its own part."""
    if ranks == 1:
        return 0.0
    return min(_transfer_s(link, protocol, ranks - 1, (ranks - 1) / ranks * nbytes) for protocol in link.protocols)


def send_s(link: DeviceLink, nbytes: float) -> float:
    """Predicted seconds of one message of `nbytes` to one other device."""
    return min(_transfer_s(link, protocol, 1, nbytes) for protocol in link.protocols)


def _transfer_s(link: DeviceLink, protocol: LinkProtocol, steps: int, nbytes: float) -> float:
    return protocol.launch_s + steps * protocol.step_s + nbytes / (link.bandwidth * protocol.share)


def available_links(device: DeviceSpec, kinds: Sequence[LinkKind] = LINK_KINDS) -> tuple[DeviceLink, ...]:
    """Return the links of the given `kinds` that a device could have.

    They are NVLink where it has any, PCIe up to its own generation, and Ethernet of each speed, with a port per device.
    """
    found = [link for link in (_nvlink(device), *_pcie(device), *_ETHERNET) if link is not None]
    return tuple(link for link in found if link.kind in kinds)


def common_links(devices: Sequence[DeviceSpec], kinds: Sequence[LinkKind] = LINK_KINDS) -> tuple[DeviceLink, ...]:
    """Return the links that all devices could have, each with the bandwidth of the slowest device and its number of
    devices.

    NVLink joins only devices of the same kind.
    """
    first, *others = ({link.name: link for link in available_links(device, kinds)} for device in devices)
    found = []
    for name, link in first.items():
        alike = [link, *(each[name] for each in others if name in each)]
        if len(alike) == len(devices) and (link.kind != "nvlink" or len({device.name for device in devices}) == 1):
            found.append(min(alike, key=lambda each: each.bandwidth))
    return tuple(found)


_TUNING = (
    "NCCL as of 2025, src/graph/tuning.cc: baseLat and hwLat of rings with LL and Simple; LL has half the bandwidth"
)
_TOPOLOGY = "NCCL as of 2025, src/graph/topo.h"
_TCP_S = 11.5e-6
_TCP = (
    "uncertain: half of the 23 us that a TCP round trip takes between hosts of one rack (Marty et al., Snap, SOSP "
    "2019, from memory), and NCCL's latency of a network"
)
# 1460 bytes of payload per 1538 bytes on the wire, with the frame's preamble and gap.
_PAYLOAD = 1460 / 1538
_FRAMES = f"computed: the speed, of which TCP has {_PAYLOAD:.1%} for payload in frames of 1500 bytes"


def _protocols(low_us: float, simple_us: float) -> tuple[LinkProtocol, LinkProtocol]:
    return LinkProtocol(6.6e-6, low_us * 1e-6, 0.5), LinkProtocol(8.4e-6, simple_us * 1e-6, 1.0)


_BY_NVLINK, _BY_PCIE, _BY_NETWORK = _protocols(0.6, 3.4), _protocols(1.0, 5.7), _protocols(2.7, 14.0)
_BY_TCP = tuple(LinkProtocol(each.launch_s, each.step_s + _TCP_S, each.share) for each in _BY_NETWORK)

# Bytes/s of one NVLink in each direction, as NCCL calculates with it, by compute capability.
_NVLINK_BANDWIDTH = {(6, 0): 18.0e9, (7, 0): 20.0e9, (7, 5): 20.0e9, (8, 0): 20.0e9, (8, 6): 12.0e9, (9, 0): 20.6e9}
_NVLINK_BANDWIDTH |= {(10, 0): 40.1e9, (10, 3): 40.1e9}
_BRIDGE, _PAIR = "datasheet: NVLink by a bridge between two", 2
_HGX = 8  # devices of a board with NVSwitch
# Device -> (number of links, most devices that they join, source).
_NVLINKS: dict[str, tuple[int, int | None, str]] = {
    "Tesla P100-SXM2-16GB": (4, 8, "NVIDIA Tesla P100 whitepaper: 4 links of 20 GB/s each way"),
    "Tesla V100-SXM2-16GB": (6, 8, "NVIDIA Tesla V100 whitepaper: 6 links of 25 GB/s each way"),
    "Tesla V100-SXM2-32GB": (6, 8, "NVIDIA Tesla V100 whitepaper: 6 links of 25 GB/s each way"),
    "NVIDIA GeForce RTX 2080 Ti": (2, _PAIR, "NVIDIA Turing whitepaper: 2 links, 100 GB/s both ways, between two"),
    "NVIDIA A100-SXM4-40GB": (12, _HGX, "NVIDIA A100 whitepaper: 12 links of 25 GB/s each way; of PCIe cards two"),
    "NVIDIA A100-SXM4-80GB": (12, _HGX, "NVIDIA A100 whitepaper: 12 links of 25 GB/s each way"),
    "NVIDIA A100 80GB PCIe": (12, _PAIR, f"NVIDIA A100 {_BRIDGE}, 600 GB/s both ways"),
    "NVIDIA GeForce RTX 3090": (4, _PAIR, "NVIDIA Ampere GA102 whitepaper: 4 links of 14 GB/s each way, between two"),
    "NVIDIA A40": (4, _PAIR, f"NVIDIA A40 {_BRIDGE}, 112.5 GB/s both ways"),
    "NVIDIA RTX A6000": (4, _PAIR, f"NVIDIA RTX A6000 {_BRIDGE}, 112.5 GB/s both ways"),
    "NVIDIA H100 PCIe": (12, _PAIR, f"NVIDIA H100 PCIe {_BRIDGE}, 600 GB/s both ways"),
    "NVIDIA H100 80GB HBM3": (18, _HGX, "NVIDIA H100 whitepaper: 18 links of 25 GB/s each way"),
    "NVIDIA H200": (18, _HGX, "NVIDIA H200 datasheet: 900 GB/s both ways"),
    "NVIDIA B200": (18, _HGX, "NVIDIA HGX B200 datasheet: 1.8 TB/s both ways"),
    "NVIDIA B300 SXM6 AC": (18, _HGX, "NVIDIA HGX B300 datasheet: 1.8 TB/s both ways"),
}


def _nvlink(device: DeviceSpec) -> DeviceLink | None:
    if device.name not in _NVLINKS:
        return None
    links, max_devices, source = _NVLINKS[device.name]
    bandwidth = links * _NVLINK_BANDWIDTH[device.capability.version]
    sources = (("links", source), ("bandwidth", f"{_TOPOLOGY}, for each link"), ("protocols", _TUNING))
    return DeviceLink("nvlink", "nvlink", bandwidth, _BY_NVLINK, max_devices, sources)


def _pcie(device: DeviceSpec) -> tuple[DeviceLink, ...]:
    own = 3 if device.capability.major < 8 else 4 if device.capability.version < (9, 0) else 5
    return _PCIE[: own - 2]


def _pcie_link(generation: int) -> DeviceLink:
    doubled = "" if generation == 3 else f"; computed: a lane of {generation}.0 has twice that of {generation - 1}.0"
    sources = (("bandwidth", f"{_TOPOLOGY}: 12 GB/s of 3.0 x16{doubled}"), ("protocols", _TUNING))
    bandwidth = 12.0e9 * 2 ** (generation - 3)
    return DeviceLink(
        f"pcie{generation}", "pcie", bandwidth, _BY_PCIE, 8, (*sources, ("max_devices", "slots of a host"))
    )


def _ethernet_link(gbits: int) -> DeviceLink:
    sources = (("bandwidth", _FRAMES), ("protocols", f"{_TUNING}; {_TCP}"))
    return DeviceLink(
        f"ethernet{gbits}", "ethernet", gbits * 1e9 / 8 * _PAYLOAD, (_BY_TCP[0], _BY_TCP[1]), None, sources
    )


_PCIE = tuple(map(_pcie_link, (3, 4, 5)))
_ETHERNET = tuple(map(_ethernet_link, (10, 25, 100)))
