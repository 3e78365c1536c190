from types import SimpleNamespace

import pytest

from motley.kernels.device import device_table
from motley.kernels.device.compute_capability import CAPABILITIES, UnsupportedCapability
from motley.kernels.device.device_lookup import find_device, match_device
from motley.kernels.device.device_spec import computed_rate
from motley.kernels.device.device_table import DEVICES

GIB = 2**30
EDITIONS = ("Workstation", "Server")
NAMES = [name for device in DEVICES for name in device.names]


def by_name(name):
    [device] = [device for device in DEVICES if name in device.names]
    return device


def test_every_capability_has_a_device():
    assert {device.capability for device in DEVICES} == set(CAPABILITIES.values())
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
class TestEach:
    def test_figures_have_sources(self, device):
        figures = ["sms", "memory", "bandwidth", *device.rates]
        figures += [name for name in ("l2", "clock", "tensor_clock") if getattr(device, name) is not None]
        assert all(len(device.source(figure)) > 10 for figure in figures)
        with pytest.raises(KeyError):
            device.source("price")

    def test_what_was_not_seen_in_a_document_of_nvidias_says_so(self, device):
        """No device is at hand: what torch prints there comes from others, as do figures that they quote."""
        papers = ("datasheet", "whitepaper", "Technical Brief")
        for figure, source in device.sources.items():
            assert source.startswith("uncertain") or any(paper in source for paper in papers), (figure, source)

    def test_what_nvidia_prints_is_what_the_units_give(self, device):
        """SMs x multiply-adds per SM x 2 x boost clock, within 2%."""
        for kind, published in device.published.items():
            computed = computed_rate(device, kind)
            if computed is not None:
                assert published == pytest.approx(computed, rel=0.02), kind
        assert device.clock is not None or device.capability.major == 10  # only there is no clock printed

    def test_without_a_clock_every_rate_is_printed(self, device):
        if device.clock is None:
            assert device.published.keys() >= {"fp32", "tensor-bf16", "tensor-fp8", "tensor-int8"}

    def test_it_does_what_its_capability_can(self, device):
        chip, rates = device.capability, device.rates
        assert ("tensor-fp16" in rates) == (chip.version >= (7, 0))
        assert ("tensor-bf16" in rates) == chip.bf16
        assert ("tensor-int8" in rates) == chip.int8_tensor
        assert ("tensor-fp8" in rates) == chip.fp8
        assert ("dp4a" in rates) == (chip.version in {(6, 1), (7, 0), (7, 5)})
        if chip.bf16:
            assert rates["tensor-bf16"] == pytest.approx(rates["tensor-fp16"], rel=0.01)
        if chip.fp8:
            assert rates["tensor-fp8"] == pytest.approx(2 * rates["tensor-bf16"], rel=0.02)
        if device.half_rate:
            assert rates["tensor-fp16-16"] == pytest.approx(2 * rates["tensor-fp16"], rel=0.01)

    def test_sizes_are_of_this_world(self, device):
        assert 16 <= device.sms <= 192
        assert 8 * GIB <= device.memory <= 288 * GIB
        assert 1e11 < device.bandwidth < 1e13
        assert device.l2 is None or 2**21 <= device.l2 <= 2**28
        assert 5e12 < device.rates["fp32"] < 2e14

    def test_found_by_each_of_its_names(self, device):
        for name in device.names:
            found = find_device(name, device.capability.version)
            assert (found.device, found.by, found.note) == (device, "name", "")


def test_a_figure_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="there are no figures named \\['colour'\\]"):
        device_table._cite("somewhere", colour=1)


@pytest.mark.parametrize(
    ("name", "figure", "value"),
    [
        # printed in the comparison of the A100 whitepaper, the Turing whitepaper and the Ada whitepaper
        ("Tesla P100-SXM2-16GB", "fp16", 21.2e12),
        ("Tesla V100-SXM2-16GB", "tensor-fp16", 125e12),
        ("NVIDIA A100-SXM4-40GB", "tensor-int8", 624e12),
        ("GeForce RTX 2080 Ti", "tensor-fp16", 53.8e12),
        ("NVIDIA GeForce RTX 4090", "tensor-fp8", 330.3e12),
        # computed: 30 x 2 x 2 x 1531e6, and 170 x 512 / 2 x 2 x 2407e6
        ("Tesla P40", "fp16", 183.72e9),
        ("NVIDIA GeForce RTX 5090", "tensor-bf16", 209.5e12),
    ],
)
def test_rates(name, figure, value):
    assert by_name(name).rates[figure] == pytest.approx(value, rel=0.001)


def test_int8_of_the_b300_is_slower_than_its_bf16():
    rates = by_name("NVIDIA B300 SXM6 AC").rates
    assert rates["tensor-int8"] < rates["tensor-bf16"] / 10


def test_found_by_shape():
    found = find_device("GRID P40-24Q", (6, 1), 30, 24 * GIB)
    assert (found.device.name, found.by) == ("Tesla P40", "shape")
    assert "GRID P40-24Q is not in the table" in found.note
    assert (
        find_device("NVIDIA H200 NVL", (9, 0), 132, 143_771 * 2**20).device.name == "NVIDIA H200"
    )  # not the H100, as wide


@pytest.mark.parametrize(
    ("name", "version", "sms", "mebibytes"),
    [
        # as torch prints total_memory on these
        ("Tesla P100-PCIE-16GB", (6, 0), 56, 16280),
        ("NVIDIA L40S", (8, 9), 142, 45589),
        ("NVIDIA H100 PCIe", (9, 0), 114, 81008),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 81089),
        ("NVIDIA H200", (9, 0), 132, 143156),
        ("NVIDIA B200", (10, 0), 148, 182631),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 97250),
    ],
)
def test_what_torch_says_of_memory_is_near_enough(name, version, sms, mebibytes):
    found = find_device("unheard of", version, sms, mebibytes * 2**20)
    assert (found.device.name, found.by) == (name, "shape")
    assert find_device("unheard of", version, sms, mebibytes * 2**20 * 3 // 4).device.name != name
    assert find_device("unheard of", version, sms, mebibytes * 2**20 * 4 // 3).device.name != name
    assert find_device("unheard of", version, sms - 1, mebibytes * 2**20).by == "capability"


def test_of_one_shape_the_slower():
    assert find_device("some GA102", (8, 6), 84, 48 * GIB).device.name == "NVIDIA A40"  # not the A6000
    editions = [
        find_device(f"NVIDIA RTX PRO 6000 Blackwell {each} Edition", (12, 0), 188, 96 * GIB) for each in EDITIONS
    ]
    workstation, server = (found.device for found in editions)
    assert [found.by for found in editions] == ["name", "name"]
    assert server.bandwidth < 0.9 * workstation.bandwidth
    assert all(server.rates[kind] < rate for kind, rate in workstation.rates.items())
    assert server.source("bandwidth").startswith("uncertain")
    assert find_device("some GB202", (12, 0), 188, 96 * GIB).device is server


def test_a_stand_in_promises_no_more_than_any_of_its_capability():
    found = find_device("NVIDIA GeForce RTX 3060", (8, 6), 28, 12 * GIB)
    assert found.by == "capability"
    assert "NVIDIA GeForce RTX 3090" in found.note  # tensor cores at half rate
    assert found.device.sms == 28
    assert found.device.memory == 12 * GIB
    for known in DEVICES:
        if str(known.capability) == "8.6":
            assert found.device.bandwidth / 28 <= known.bandwidth / known.sms * 1.001
            assert found.device.rates["tensor-fp16"] / 28 <= known.rates["tensor-fp16"] / known.sms * 1.001


def test_an_unknown_capability_says_so():
    found = find_device("NVIDIA GB10", (12, 1), 48, 119 * GIB)
    assert found.by == "capability"
    assert found.note.startswith("compute capability 12.1 is not in the table: taken as 12.0")
    with pytest.raises(UnsupportedCapability):
        find_device("Tesla M40", (5, 2))


def told(name, major, minor, sms, gib, l2=None):
    given = {"name": name, "major": major, "minor": minor, "multi_processor_count": sms, "total_memory": gib * GIB}
    return SimpleNamespace(**given, **({"L2_cache_size": l2} if l2 else {}))


def test_at_hand_torch_is_believed():
    found = match_device(told("NVIDIA H100 80GB HBM3", 9, 0, 132, 79, 50 * 2**20))
    assert found.by == "name"
    assert found.device.memory == 79 * GIB
    assert "torch" in found.device.source("memory")
    assert found.device.bandwidth == 3350e9
    assert match_device(told("Tesla T4", 7, 5, 40, 15)).device.l2 == 4096 * 1024  # older torch says nothing of L2


def test_at_hand_a_part_of_a_card_has_a_part_of_its_rates():
    whole, part = by_name("NVIDIA A100-SXM4-40GB"), match_device(told("NVIDIA A100-SXM4-40GB", 8, 0, 54, 20)).device
    assert part.rates["tensor-bf16"] == pytest.approx(whole.rates["tensor-bf16"] / 2)
    assert part.bandwidth == pytest.approx(whole.bandwidth / 2)
    assert part.source("bandwidth").startswith("computed: 54 of the 108 SMs")
