"""Table of devices, with a source for each figure: a datasheet, a whitepaper, or third parties.

No figure was measured on a device of ours.
"""

from __future__ import annotations

from .compute_capability import CAPABILITIES
from .device_spec import ARITHMETIC, Arithmetic, DeviceSpec

Cited = dict[str, tuple[float, str]]  # figure -> (value, source)
_FIELDS = {"sms", "gib", "gbps", "l2_kib", "mhz", "tensor_mhz"}


def _cite(source: str, **figures: float) -> Cited:
    """Return figures with their source.

    gib is memory in GiB; gbps bandwidth in GB/s; mhz the boost clock, and tensor_mhz that of the tensor cores if
    different; rates are in 1e12 operations/s. Raises ValueError for an unknown figure.
    """
    named = {figure if figure in _FIELDS else figure.replace("_", "-"): value for figure, value in figures.items()}
    if unknown := named.keys() - _FIELDS - set(ARITHMETIC):
        raise ValueError(f"{source}: there are no figures named {sorted(unknown)}")
    return {figure: (value, source) for figure, value in named.items()}


def _device(names: str, capability: tuple[int, int], *cited: Cited, half_rate: bool = False) -> DeviceSpec:
    """Return one row of the table.

    `names` are those that torch reports, separated by " | ". A single clock is used for the tensor cores as well.
    """
    given: Cited = {figure: value for cites in cited for figure, value in cites.items()}
    if "mhz" in given:
        given.setdefault("tensor_mhz", given["mhz"])
    fields = {"gib": "memory", "gbps": "bandwidth", "l2_kib": "l2", "mhz": "clock", "tensor_mhz": "tensor_clock"}
    rates: list[Arithmetic] = [kind for kind in ARITHMETIC if kind in given]
    return DeviceSpec(
        name=names.split(" | ")[0],
        names=tuple(names.split(" | ")),
        capability=CAPABILITIES[capability],
        sms=int(given["sms"][0]),
        memory=int(given["gib"][0] * 2**30),
        bandwidth=given["gbps"][0] * 1e9,
        l2=int(given["l2_kib"][0] * 1024) if "l2_kib" in given else None,
        clock=given["mhz"][0] * 1e6 if "mhz" in given else None,
        tensor_clock=given["tensor_mhz"][0] * 1e6 if "tensor_mhz" in given else None,
        half_rate=half_rate,
        published={kind: given[kind][0] * 1e12 for kind in rates},
        sources={fields.get(figure, figure): source for figure, (_, source) in given.items()},
    )


def _sheet(name: str) -> str:
    return f"NVIDIA {name} datasheet"


_A100_PAPER = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, comparison of data center GPUs"
_TURING_PAPER = "NVIDIA Turing GPU Architecture whitepaper, appendix"
_GA102_PAPER = "NVIDIA Ampere GA102 GPU Architecture whitepaper 2.0"
_ADA_PAPER = "NVIDIA Ada GPU Architecture whitepaper 2.1, appendix"
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
_RTX_PAPER = "NVIDIA RTX Blackwell GPU Architecture whitepaper"
_BRIEF = "NVIDIA Blackwell Architecture Technical Brief, HGX, per GPU"
_HGX = "NVIDIA HGX B200 and B300 datasheet, an eighth of its 8 GPUs"
_PRINTED = "uncertain: what torch.cuda.get_device_properties printed for others, as they quote it"
_QUOTED = "uncertain: as third parties quote it, not seen in a document of NVIDIA's"
_ADA_UNSEEN = f"uncertain: {_ADA_PAPER}, from memory; the datasheet's rates agree with it"
_SERVER_UNSEEN = f"uncertain: {_sheet('RTX PRO 6000 Blackwell Server Edition')}, from memory"
_HALF_OF_SPARSE = ", half of what it gives with sparsity"
_B300_INT8 = "uncertain: HGX B300 datasheet, 2 to 3 POP/s of 8 GPUs with sparsity; third parties quote 0.15 dense"

_GP100 = _cite(_A100_PAPER, sms=56, l2_kib=4096) | _cite(_sheet("Tesla P100"), gib=16, gbps=732)
_GV100 = _cite(_A100_PAPER, sms=80, l2_kib=6144)
_V100_SXM2 = _GV100 | _cite(_A100_PAPER, mhz=1530, gbps=900, fp32=15.7, fp16=31.4, tensor_fp16=125, tensor_fp16_16=125)
_V100_PCIE = _GV100 | _cite(_sheet("Tesla V100"), gbps=900, fp32=14, tensor_fp16=112) | _cite(_QUOTED, mhz=1380)
_A100_RATES = _cite(_A100_PAPER, fp32=19.5, fp16=78, tensor_fp16=312, tensor_fp16_16=312, tensor_bf16=312)
_GA100 = _A100_RATES | _cite(_A100_PAPER, sms=108, mhz=1410, l2_kib=40960, tensor_int8=624)
_H100_SXM = _cite(_H100_PAPER, sms=132, mhz=1980, tensor_mhz=1830) | _cite(
    _sheet("H100"), fp32=67, tensor_fp16=989.5, tensor_bf16=989.5, tensor_int8=1979, tensor_fp8=1979
)
_GB100 = _cite(_BRIEF, tensor_fp16=2250, tensor_bf16=2250, tensor_fp8=4500) | _cite(_HGX, fp32=75)

# fmt: off
DEVICES: tuple[DeviceSpec, ...] = (
    _device("Tesla P100-PCIE-16GB", (6, 0), _GP100,
            _cite(_sheet("Tesla P100"), fp32=9.3, fp16=18.7), _cite(_QUOTED, mhz=1303)),
    _device("Tesla P100-PCIE-12GB", (6, 0), _cite(_A100_PAPER, sms=56), _cite(_QUOTED, mhz=1303),
            _cite(_sheet("Tesla P100"), gib=12, gbps=549, fp32=9.3, fp16=18.7)),
    _device("Tesla P100-SXM2-16GB", (6, 0), _GP100, _cite(_A100_PAPER, mhz=1480, fp32=10.6, fp16=21.2)),
    _device("Tesla P40", (6, 1),
            _cite(_sheet("Tesla P40"), gib=24, gbps=346, dp4a=47),
            _cite(_QUOTED, sms=30, mhz=1531), _cite(_TURING_PAPER + ", GP102 with 384 bits", l2_kib=3072)),
    _device("Tesla P4", (6, 1),
            _cite(_sheet("Tesla P4"), gib=8, gbps=192, fp32=5.5, dp4a=22),
            _cite(_QUOTED, sms=20, mhz=1063, l2_kib=2048)),
    _device("NVIDIA GeForce GTX 1080 Ti | GeForce GTX 1080 Ti", (6, 1),
            _cite(_TURING_PAPER, sms=28, mhz=1582, gib=11, gbps=484, l2_kib=2816, fp32=11.3)),
    _device("Tesla V100-SXM2-16GB", (7, 0), _V100_SXM2, _cite(_A100_PAPER, gib=16)),
    _device("Tesla V100-SXM2-32GB", (7, 0), _V100_SXM2, _cite(_A100_PAPER, gib=32)),
    _device("Tesla V100-PCIE-16GB", (7, 0), _V100_PCIE, _cite(_sheet("Tesla V100"), gib=16)),
    _device("Tesla V100-PCIE-32GB", (7, 0), _V100_PCIE, _cite(_sheet("Tesla V100"), gib=32)),
    _device("Tesla T4", (7, 5),
            _cite(_sheet("T4"), gib=16, gbps=320, fp32=8.1, tensor_fp16=65, tensor_int8=130),
            _cite(_QUOTED, sms=40, mhz=1590, l2_kib=4096)),
    _device("NVIDIA GeForce RTX 2080 Ti | GeForce RTX 2080 Ti", (7, 5),
            _cite(_TURING_PAPER, sms=68, mhz=1545, gib=11, gbps=616, l2_kib=5632, fp32=13.4, fp16=26.9,
                  tensor_fp16=53.8, tensor_fp16_16=107.6, tensor_int8=215.2), half_rate=True),
    _device("NVIDIA A100-SXM4-40GB | A100-SXM4-40GB | NVIDIA A100-PCIE-40GB | A100-PCIE-40GB", (8, 0), _GA100,
            _cite(_A100_PAPER, gib=40, gbps=1555)),
    _device("NVIDIA A100-SXM4-80GB | A100-SXM4-80GB", (8, 0), _GA100, _cite(_sheet("A100"), gib=80, gbps=2039)),
    _device("NVIDIA A100 80GB PCIe", (8, 0), _GA100, _cite(_sheet("A100"), gib=80, gbps=1935)),
    _device("NVIDIA A10", (8, 6),
            _cite(_sheet("A10"), gib=24, gbps=600, fp32=31.2, tensor_fp16=125, tensor_bf16=125, tensor_int8=250),
            _cite(_QUOTED, sms=72, mhz=1695, l2_kib=6144)),
    _device("NVIDIA GeForce RTX 3090 | GeForce RTX 3090", (8, 6),
            _cite(_GA102_PAPER, sms=82, mhz=1695, gib=24, gbps=936, l2_kib=6144, fp32=35.6, fp16=35.6,
                  tensor_fp16=71, tensor_fp16_16=142, tensor_bf16=71, tensor_int8=284), half_rate=True),
    _device("NVIDIA A40", (8, 6),
            _cite(_sheet("A40"), gib=48, gbps=696, fp32=37.4, tensor_fp16=149.7, tensor_bf16=149.7, tensor_int8=299.3),
            _cite(_QUOTED, sms=84, mhz=1740, l2_kib=6144)),
    _device("NVIDIA RTX A6000", (8, 6),
            _cite(_sheet("RTX A6000"), gib=48, gbps=768, fp32=38.7), _cite(_QUOTED, sms=84, mhz=1800, l2_kib=6144),
            _cite(_sheet("RTX A6000") + _HALF_OF_SPARSE, tensor_fp16=154.85)),
    _device("NVIDIA L4", (8, 9),
            _cite(_sheet("L4"), gib=24, gbps=300, fp32=30.3), _cite(_ADA_UNSEEN, sms=58, mhz=2040, l2_kib=49152),
            _cite(_sheet("L4") + _HALF_OF_SPARSE,
                  tensor_fp16=121, tensor_bf16=121, tensor_int8=242.5, tensor_fp8=242.5)),
    _device("NVIDIA L40S", (8, 9),
            _cite(_sheet("L40S"), gib=48, gbps=864, fp32=91.6, tensor_fp16=362.05, tensor_bf16=362.05,
                  tensor_int8=733, tensor_fp8=733), _cite(_PRINTED, sms=142), _cite(_QUOTED, mhz=2520, l2_kib=98304)),
    _device("NVIDIA GeForce RTX 4090", (8, 9),
            _cite(_ADA_PAPER, sms=128, mhz=2520, gib=24, gbps=1008, l2_kib=73728, fp32=82.6, tensor_fp16=165.2,
                  tensor_fp16_16=330.3, tensor_bf16=165.2, tensor_int8=660.6, tensor_fp8=330.3), half_rate=True),
    _device("NVIDIA H100 PCIe", (9, 0),
            _cite(_sheet("H100"), gib=80, gbps=2000, l2_kib=51200, fp32=51, tensor_fp16=756.5, tensor_bf16=756.5,
                  tensor_int8=1513, tensor_fp8=1513), _cite(_H100_PAPER, sms=114, mhz=1755, tensor_mhz=1620)),
    _device("NVIDIA H100 80GB HBM3", (9, 0), _H100_SXM, _cite(_sheet("H100"), gib=80, gbps=3350, l2_kib=51200)),
    _device("NVIDIA H200", (9, 0), _H100_SXM,
            _cite(_sheet("H200"), gib=141, gbps=4800), _cite(_PRINTED, l2_kib=61440)),
    _device("NVIDIA B200", (10, 0), _GB100,
            _cite(_HGX, gib=180, gbps=7700), _cite(_BRIEF, tensor_int8=4500), _cite(_PRINTED, sms=148, l2_kib=129024)),
    _device("NVIDIA B300 SXM6 AC", (10, 3), _GB100,
            _cite(_HGX, gib=268, gbps=8000), _cite(_QUOTED, sms=148), _cite(_B300_INT8, tensor_int8=150)),
    _device("NVIDIA GeForce RTX 5090", (12, 0),
            _cite(_RTX_PAPER, sms=170, mhz=2407, gib=32, gbps=1792, l2_kib=98304, fp32=104.8, tensor_fp16_16=419),
            half_rate=True),
    _device("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0),
            _cite(_sheet("RTX PRO 6000 Blackwell"), gib=96, gbps=1792, fp32=125),
            _cite(_PRINTED, sms=188, l2_kib=131072), _cite(_QUOTED, mhz=2617)),
    _device("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0),
            _cite(_sheet("RTX PRO 6000 Blackwell"), gib=96), _cite(_SERVER_UNSEEN, gbps=1597, fp32=120),
            _cite(_PRINTED, sms=188, l2_kib=131072), _cite(_SERVER_UNSEEN + ": its fp32 over its lanes", mhz=2493)),
)
# fmt: on
