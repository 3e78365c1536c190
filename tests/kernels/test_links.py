"""Links between devices: what their arithmetic adds up to, and where its figures are from."""

from __future__ import annotations

import pytest

from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.interconnect import (
    LINK_KINDS,
    DeviceLink,
    LinkProtocol,
    all_gather_s,
    all_reduce_s,
    available_links,
    common_links,
    send_s,
)

BY_NAME = {device.name: device for device in DEVICES}
LINK = DeviceLink("test", "pcie", 1e9, (LinkProtocol(1e-6, 2e-6, 0.5), LinkProtocol(3e-6, 10e-6, 1.0)), None, ())


def names(device: str) -> list[str]:
    return [link.name for link in available_links(BY_NAME[device])]


@pytest.mark.parametrize(
    ("ranks", "nbytes", "expected"),
    [
        (1, 1e6, 0.0),
        (4, 8.0, 1e-6 + 2e-6 + 3 * 8 / 0.5e9),  # at one shot: one step, and all to every other
        (4, 4e3, 1e-6 + 6 * 2e-6 + 1.5 * 4e3 / 0.5e9),  # a ring: six steps, and one and a half times the bytes
        (4, 1e6, 3e-6 + 6 * 10e-6 + 1.5e6 / 1e9),  # a ring with all of the bandwidth
    ],
)
def test_sums_take_the_fastest_way(ranks: int, nbytes: float, expected: float) -> None:
    assert all_reduce_s(LINK, ranks, nbytes) == pytest.approx(expected, rel=1e-12)


def test_gathers_and_messages() -> None:
    assert all_gather_s(LINK, 1, 1e6) == 0
    assert all_gather_s(LINK, 4, 8.0) == pytest.approx(1e-6 + 3 * 2e-6 + 6 / 0.5e9, rel=1e-12)
    assert all_gather_s(LINK, 4, 1e6) == pytest.approx(3e-6 + 3 * 10e-6 + 0.75e6 / 1e9, rel=1e-12)
    assert send_s(LINK, 8.0) == pytest.approx(1e-6 + 2e-6 + 8 / 0.5e9, rel=1e-12)
    assert send_s(LINK, 1e6) == pytest.approx(3e-6 + 10e-6 + 1e6 / 1e9, rel=1e-12)


def test_devices_have_the_links_that_they_have() -> None:
    ethernet = ["ethernet10", "ethernet25", "ethernet100"]
    assert names("Tesla T4") == ["pcie3", *ethernet]
    assert names("NVIDIA L4") == ["pcie3", "pcie4", *ethernet]
    assert names("NVIDIA H200") == ["nvlink", "pcie3", "pcie4", "pcie5", *ethernet]
    assert [link.name for link in available_links(BY_NAME["NVIDIA H200"], ["nvlink"])] == ["nvlink"]
    assert available_links(BY_NAME["Tesla P40"], ["nvlink"]) == ()
    bridged = {link.name: link.max_devices for link in available_links(BY_NAME["NVIDIA A40"])}
    assert bridged["nvlink"] == 2
    assert bridged["ethernet10"] is None


def test_devices_that_differ_have_the_links_of_all() -> None:
    def common(*devices: str) -> list[str]:
        return [link.name for link in common_links([BY_NAME[device] for device in devices])]

    ethernet = ["ethernet10", "ethernet25", "ethernet100"]
    assert common("Tesla T4", "NVIDIA L4") == ["pcie3", *ethernet]
    assert common("NVIDIA H200", "NVIDIA H100 80GB HBM3") == ["pcie3", "pcie4", "pcie5", *ethernet], "no NVLink between"
    for device in ("NVIDIA H200", "Tesla T4"):
        assert common_links([BY_NAME[device]] * 3) == available_links(BY_NAME[device])


def test_links_are_in_the_order_of_their_speed() -> None:
    """And none is faster than the memory of a device, nor slower than the speed it is named by would let it be."""
    for device in DEVICES:
        of_kind = {kind: [link.bandwidth for link in available_links(device, [kind])] for kind in LINK_KINDS}
        for bandwidths in of_kind.values():
            assert bandwidths == sorted(bandwidths)
            assert all(bandwidth < device.bandwidth for bandwidth in bandwidths)
        if of_kind["nvlink"]:
            assert of_kind["nvlink"][0] > of_kind["pcie"][0]
        assert of_kind["ethernet"] == pytest.approx([gbits / 8 * 1e9 * 1460 / 1538 for gbits in (10, 25, 100)])


def test_every_figure_has_its_source() -> None:
    for device in DEVICES:
        for link in available_links(device):
            assert {"bandwidth", "protocols"} <= dict(link.sources).keys()
            assert all(source for _, source in link.sources)
            low, simple = link.protocols
            assert low.step_s < simple.step_s
            assert low.share < simple.share == 1
