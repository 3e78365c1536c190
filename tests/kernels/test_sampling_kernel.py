"""Sampling in Triton's interpreter: exactly its reference, and the tokens of the CPU sampler."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config, Variant
from motley.kernels.sampling import sample_reference
from motley.kernels.sampling.integer_arithmetic import ADD_PTX, ceiling, uniform_bits, weight_of
from motley.kernels.sampling.sample import PenaltyRows, SamplingRows, VocabularySplit, penalize_logits, sample
from motley.kernels.sampling.sample_kernels import keys_and_weights
from motley.kernels.sampling.sample_operation import SAMPLE, logprob_error, random_rows
from motley.replicas.execution import philox, sampler
from motley.replicas.execution.step_plan import SampleSpec
from motley.replicas.sampling_params import SamplingParams

# numpy, on which the interpreter runs, warns of what is tested here
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

CONFIG = Config.of(4, CHUNK=512, TILE=512)
CPU = torch.device("cpu")


def rows(count: int, **fields: float) -> SamplingRows:
    """`count` rows alike but for their positions."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "choice": 0, **fields}
    kinds = {"top_k": torch.int32, "choice": torch.int32, "seed": torch.int64}
    tensors = {name: torch.full((count,), value, dtype=kinds.get(name, torch.float32)) for name, value in given.items()}
    return SamplingRows(**tensors, position=torch.arange(count))


def check(logits: torch.Tensor, given: SamplingRows, config: Config = CONFIG) -> list[int]:
    tokens, logprobs = sample(logits, given, config)
    assert tokens.tolist() == sample_reference.choose_tokens(logits, given)
    assert logprob_error(logits, tokens, logprobs) <= 1
    return [int(token) for token in tokens]


@triton.jit
def _weights(keys, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, weight_of(tl.load(keys + at)))


@triton.jit
def _bits(seeds, choices, positions, out):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    bits = uniform_bits(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
    tl.store(out + row, (bits >> 11).to(tl.int64))


def test_weights_are_those_of_the_reference_and_fall_as_the_exponential() -> None:
    keys = torch.randint(0, 2**30, (2**16,), generator=torch.Generator().manual_seed(0)).sort().values
    keys[:4] = torch.arange(4)
    keys[-1] = 2**30 + 2**20 + 1024
    found = torch.empty(len(keys), dtype=torch.int64)
    _weights[(1,)](keys.int(), found, len(keys))
    assert torch.equal(found, sample_reference.weights_of(keys))
    exact = 2.0**44 * (-keys.double() / 2**25).exp()
    assert ((found - exact).abs() <= 1 + 2.0**-27 * exact).all()
    assert found[0] == 2**44
    assert found[-1] == 0
    steps = torch.arange(2**18)  # neighbours never rise, nor where the power of two changes
    for start in (0, 1, round(2**25 * math.log(2)) - 2**17, round(2**25 * 7 * math.log(2)) - 2**17):
        assert (sample_reference.weights_of(start + steps).diff() <= 0).all()


def test_random_numbers_are_those_of_the_cpu_sampler() -> None:
    cases = [(0, 0, 0), (-1, 127, 2**31), (2**63 - 1, 1, 5), (-(2**63), 0, 2**40), (123456789, 3, 77)]
    seeds, choices, positions = (torch.tensor(column) for column in zip(*cases, strict=True))
    found = torch.empty(len(cases), dtype=torch.int64)
    _bits[(len(cases),)](seeds, choices.int(), positions, found)
    assert [bits / 2**53 for bits in found.tolist()] == [philox.uniform(*case) for case in cases]
    assert [sample_reference.uniform_bits(*case) for case in cases] == found.tolist()


@triton.jit
def _ceilings(values, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, ceiling(tl.load(values + at)))


@triton.jit
def _keys(logits, numbers, keys, weights, V, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    top, temperature, min_p = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    key, weight = keys_and_weights(logits, tl.program_id(0), at, top, temperature, min_p, V)
    tl.store(keys + at, key, at < V)
    tl.store(weights + at, weight, at < V)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.3])
def test_keys_are_the_quotients_of_the_cpu_sampler(temperature: float) -> None:
    logits = 20 - 30 * torch.rand(1000, generator=torch.Generator().manual_seed(6))
    logits[:4] = torch.tensor([20.0, -math.inf, 19.999998, -1e30])
    keys, weights = torch.empty(1000, dtype=torch.int32), torch.empty(1000, dtype=torch.int64)
    _keys[(1,)](logits, torch.tensor([20.0, temperature, 0.0]), keys, weights, 1000, 1024)
    quotients = -((logits - 20.0) / temperature)  # as replicas/execution/sampler.py has them, but for the sign
    assert torch.equal(keys.long(), (quotients.clamp(max=31.5) * 2**25).long())
    assert torch.equal(weights, sample_reference.weights_of(keys.long()))
    assert weights[[0, 1, 3]].tolist() == [2**44, 0, 0]


def test_fractions_are_rounded_up() -> None:
    values = torch.tensor([0.0, 2.0**-40, 0.5, 1.0, 1.0000001, 3.5, 2.0**44 - 2**20, 2.0**44])
    found = torch.empty(8, dtype=torch.int64)
    _ceilings[(1,)](values, found, 8)
    assert found.tolist() == [math.ceil(value) for value in values.tolist()]


@pytest.mark.parametrize("size", [1, 255, 1025])
def test_every_size(size: int) -> None:
    logits = 4 * torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    check(logits, random_rows(5, CPU, seed=size))


@pytest.mark.parametrize("temperature", [1e-30, 0.05, 1.0, 100.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.6, 0.0), (50, 0.9, 0.01), (0, 1.0, 0.2)])
def test_every_filter(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = 4 * torch.randn(2, 700, generator=torch.Generator().manual_seed(top_k))
    check(logits, rows(2, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))


def test_a_whole_vocabulary() -> None:
    logits = 3 * torch.randn(4, 152_064, generator=torch.Generator().manual_seed(0))
    given = rows(4, temperature=0.9, top_k=0, top_p=0.95)
    given.top_k[1:3] = torch.tensor([50, 100_000])
    given.top_p[2:] = torch.tensor([1.0, 0.9999])
    check(logits, given, Config.of(4, CHUNK=32768, TILE=32768))


def test_the_cpu_sampler_chooses_the_same() -> None:
    """Here no random number falls on a border; where one does, sampling.py says what may differ."""
    count, size = 32, 300
    logits = 3 * torch.randn(count, size, generator=torch.Generator().manual_seed(3))
    given = random_rows(count, CPU, seed=5)
    found, logprobs = sample(logits, given, CONFIG)
    asked = zip(*(getattr(given, name).tolist() for name in given.__slots__), strict=True)
    specs = [
        SampleSpec(SamplingParams(temperature=heat, top_k=k, top_p=p, min_p=low, logprobs=0), *drawn, (), (), ())
        for heat, k, p, low, *drawn in asked
    ]
    wanted = [result.token for result in sampler.sample(logits, specs)]
    assert [each.token_id for each in wanted if each] == found.tolist()
    theirs = torch.tensor([each.logprob for each in wanted if each])
    assert len(theirs) == count
    assert max(logprob_error(logits, found, each) for each in (logprobs, theirs)) <= 1
    assert len(set(found.tolist())) > 15


def test_of_equal_logits_the_lowest_ids_stay() -> None:
    logits = torch.zeros(4, 1000)
    assert set(check(logits, rows(4, top_k=3))) <= {0, 1, 2}
    assert set(check(logits, rows(4, top_p=0.0029))) <= {0, 1, 2}
    for config in (CONFIG, Config.of(1, CHUNK=256, TILE=64)):
        assert set(check(logits[:2], rows(2, temperature=0.0), config)) == {0}
    logits[:, 300:900] = 1.0
    assert set(check(logits, rows(4, top_k=2))) <= {300, 301}
    assert max(check(logits, rows(4, temperature=100.0, top_k=605))) >= 300, "of two chunks, and five ids below 300"
    assert min(check(logits, rows(4, top_k=605, min_p=0.5))) >= 300


def test_logits_a_unit_in_the_last_place_apart_are_told_apart() -> None:
    logits = torch.full((4, 600), 20.0)
    logits[:, 77] = torch.nextafter(torch.tensor(20.0), torch.tensor(30.0))
    assert set(check(logits, rows(4, top_k=1))) == {77}
    assert set(check(logits, rows(4, top_k=2))) == {0, 77}


def test_the_cut_of_a_row_changes_no_token() -> None:
    logits = 5 * torch.randn(4, 260, generator=torch.Generator().manual_seed(8))
    given = random_rows(4, CPU, seed=8)
    cuts = [Config.of(1, CHUNK=64, TILE=32), Config.of(2, CHUNK=1024, TILE=512), Config.of(1, CHUNK=256, TILE=256)]
    found = [sample(logits, given, config)[0].tolist() for config in cuts]
    assert found[0] == found[1] == found[2]
    alone = [sample(logits[[3]], SamplingRows(*(getattr(given, name)[[3]] for name in given.__slots__)), cuts[1])[0]]
    assert alone[0].tolist() == found[0][3:4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_an_id_that_exists_and_no_log_probability(temperature: float) -> None:
    logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(9))
    logits[0, 500], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    logits[3] = math.nan
    logits[4, :-1] = -math.inf
    given = rows(6, temperature=temperature, top_k=20, top_p=0.9)
    tokens, logprobs = sample(logits, given, CONFIG)
    assert tokens[:4].tolist() == [0] * 4
    assert logprobs.isnan().tolist() == [True] * 4 + [False] * 2
    assert (tokens[4], logprobs[4]) == (599, 0)
    assert tokens[5] == sample_reference.choose_tokens(logits, given)[5]


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0])
def test_whatever_the_parameters_the_id_exists(temperature: float) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    for fields in ({"top_p": math.nan}, {"top_p": -1.0, "top_k": 2**31 - 1}, {"min_p": math.nan}, {"min_p": 2.0}):
        tokens, _ = sample(logits, rows(3, temperature=temperature, **fields), CONFIG)
        assert ((tokens >= 0) & (tokens < 300)).all()


def test_log_probabilities_are_the_models_own() -> None:
    own = torch.randn(4, 600, generator=torch.Generator().manual_seed(2))
    masked = own.clone()
    masked[:, :590] = -math.inf
    tokens, logprobs = sample(masked, rows(4), CONFIG, own=own)
    assert (tokens >= 590).all()
    assert logprob_error(own, tokens, logprobs) <= 1
    own[1, 2] = math.nan
    assert sample(masked, rows(4), CONFIG, own=own)[1].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize(("top_k", "top_p"), [(False, False), (True, False), (False, True)])
def test_launches_that_no_row_needs_may_be_left_out(top_k: bool, top_p: bool) -> None:
    logits = 3 * torch.randn(4, 900, generator=torch.Generator().manual_seed(4))
    given = rows(4, top_k=30 if top_k else 0, top_p=0.8 if top_p else 1.0, min_p=0.01)
    tokens, _ = sample(logits, given, CONFIG, top_k=top_k, top_p=top_p)
    assert tokens.tolist() == sample_reference.choose_tokens(logits, given)


def test_the_host_reads_nothing_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All on "meta", where a tensor has no data: whoever asks for some gets an exception."""
    logits = torch.empty(3, 900, device="meta")
    for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, bool):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(logits[0, 0])
    launched = []
    monkeypatch.setattr(Variant, "launch", lambda variant, grid, *_: launched.append((variant.name, grid)))
    for name in ("synchronize", "current_stream", "Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    given = rows(3)
    given = SamplingRows(*(getattr(given, name).to("meta") for name in given.__slots__))
    tokens, logprobs = sample(logits, given, CONFIG, own=torch.empty_like(logits))
    assert (tokens.device, logprobs.device) == (logits.device, logits.device)
    names = [name for name, _ in launched]
    assert names == ["sample_survey"] * 2 + [f"sample_tally_{step}" for step in range(5)] + [
        "sample_weigh",
        "sample_draw",
    ]
    assert [grid for _, grid in launched] == [(3, 2)] * 8 + [(3,)]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="TILE: 64 is not accepted; expected 128 or more"):
        VocabularySplit.of(1000, Config.of(4, CHUNK=512, TILE=64))
    with pytest.raises(ValueError, match="vocabulary: 262145"):
        VocabularySplit.of(2**18 + 1, CONFIG)
    with pytest.raises(ValueError, match=r"top_k: torch.int64 \(2,\) is not accepted; expected contiguous torch.int32"):
        replace(rows(2), top_k=torch.zeros(2, dtype=torch.int64))
    assert sample(torch.empty(0, 10), rows(0), CONFIG)[0].shape == (0,)


def test_the_inline_ptx_adds_what_is_not_zero() -> None:
    """Its instructions one by one, in Python."""
    for value in (0, 5, 2**44):
        memory, registers, wanted = {64: 2**40}, {"$1": 64, "$2": value}, True
        for line in filter(None, (line.strip(" ;") for line in ADD_PTX.value.strip("{}\n ").splitlines())):
            name, *operands = line.replace(",", "").split()
            if name == "setp.ne.s64":
                wanted = registers[operands[1]] != int(operands[2])
            elif name == "@wanted":
                assert operands == ["red.global.add.u64", "[$1]", "$2"]
                memory[registers["$1"]] += registers["$2"] if wanted else 0
            elif name == "mov.b32":
                registers[operands[0]] = int(operands[1])
            else:
                assert name == ".reg"
        assert memory == {64: 2**40 + value}
        assert registers["$0"] == 0


@pytest.mark.parametrize("filters", ["none", "all"])
def test_the_operation(filters: str) -> None:
    policy, shape = policy_of(8, 0), ProblemShape.of(filters=filters, r=2, v=9000)
    problem = SAMPLE.problem(policy, shape, CPU)
    configs = SAMPLE.configs(policy, shape)
    for config in configs[:1]:
        assert problem.error(problem.run(config)) <= 1
    for config in configs:
        assert len(SAMPLE.launches(policy, shape, config)) == (9 if filters == "all" else 3)


def penalties(given: list[tuple[float, float, float]], places: list[int]) -> PenaltyRows:
    return PenaltyRows(torch.tensor(places), *map(torch.tensor, zip(*given, strict=True)))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("size", [1, 700, 1024])
def test_penalties_are_to_the_bit_those_of_the_cpu_sampler(dtype: torch.dtype, size: int) -> None:
    """Each sequence by its own, from its own row of the history; a row without any is left as it is."""
    source = torch.Generator().manual_seed(size)
    logits = 8 * torch.randn(6, size, generator=source)
    logits[0, 0], logits[1, 0], logits[2, 0] = 0.0, -0.0, 3e38
    texts = [
        (torch.randint(size, (n,), generator=source).tolist(), torch.randint(size, (m,), generator=source).tolist())
        for n, m in ((5, 0), (40, 30), (1, 300), (9, 9), (3, 1), (2, 2))
    ]
    texts[2][1].extend([0] * 5000)
    asked = [(1.05, 0.0, 0.0), (1.3, 0.3, 0.7), (1e-30, -2.0, 0.1), (1.0, 1.1, -0.37), (7.7, 0.0, 0.3), (1.0, 0.0, 0.0)]
    places = [3, 0, 6, 5, 1, 2]
    history = torch.zeros(7, size, dtype=dtype)
    for place, (prompt, output) in zip(places, texts, strict=True):
        history[place, prompt] = torch.iinfo(dtype).min
        history[place] += torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=size).to(dtype)
    given = penalties(asked, places)
    expected = []
    for row, (prompt, output), (repetition, presence, frequency) in zip(logits, texts, asked, strict=True):
        params = SamplingParams(
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, seed=0
        )
        expected.append(sampler.adjust_logits(row, SampleSpec(params, 0, 0, len(output), (), prompt, output)))
    for found in (penalize_logits(logits, history, given, CONFIG), sample_reference.penalize(logits, history, given)):
        assert torch.equal(found.view(torch.int32), torch.stack(expected).view(torch.int32))


def test_penalties_of_no_rows_and_of_wrong_types() -> None:
    history = torch.zeros(2, 40, dtype=torch.int16)
    none = PenaltyRows(torch.zeros(0, dtype=torch.int64), *[torch.zeros(0)] * 3)
    assert penalize_logits(torch.zeros(0, 40), history, none, CONFIG).shape == (0, 40)
    with pytest.raises(ValueError, match=r"place: torch\.int32"):
        PenaltyRows(torch.zeros(1, dtype=torch.int32), *[torch.zeros(1)] * 3)
