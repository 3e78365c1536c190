"""Traces as they are published: each format is read, and what is wrong in a line is named."""

import pytest

from motley.cluster.fleet.plan.request_trace import busiest_window, read_trace, rescale_trace, synthetic_trace
from motley.cluster.simulation.traffic import arrival_block_hashes
from motley.replicas.errors import InvalidRequest

MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [7, 8, 9]}
{"timestamp": 3000, "input_length": 1030, "output_length": 1, "hash_ids": [7, 8, 12]}

{"timestamp": 2000, "input_length": 40, "output_length": 0, "hash_ids": [3]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.0319600,396,109
2023-11-16 18:17:05.9799600,879,55
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""


def reading(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path)


def test_mooncakes_requests_share_the_blocks_whose_ids_they_share(tmp_path):
    trace = reading(tmp_path, MOONCAKE)
    assert (trace.format, trace.empty) == ("Mooncake", 1)
    assert [(each.at_s, each.prompt_tokens, each.output_tokens) for each in trace.arrivals] == [
        (0.0, 1100, 20), (2.0, 1030, 1),
    ]  # fmt: skip
    one, two = map(arrival_block_hashes, trace.arrivals)
    assert (len(one), len(two)) == (68, 64)
    assert one[:64] == two
    assert len(set(one)) == 68


def test_azures_times_have_seven_digits(tmp_path):
    trace = reading(tmp_path, AZURE)
    assert trace.format == "Azure"
    assert [each.prompt_tokens for each in trace.arrivals] == [374, 396, 879]
    assert [each.output_tokens for each in trace.arrivals] == [44, 109, 55]
    assert [each.at_s for each in trace.arrivals] == pytest.approx([0, 0.052, 2.0], abs=1e-5)
    assert len({hashed for each in trace.arrivals for hashed in arrival_block_hashes(each)}) == 23 + 24 + 54


def test_burstgpts_failures_are_left_out_and_counted(tmp_path):
    trace = reading(tmp_path, BURST)
    assert (trace.format, trace.empty) == ("BurstGPT", 1)
    assert [(each.at_s, each.prompt_tokens, each.output_tokens) for each in trace.arrivals] == [
        (0.0, 472, 18), (113.5, 417, 276),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1 .* expected JSON objects"),
        ("a,b\n1,2\n", "line 1 .* Request tokens"),
        (MOONCAKE + '{"timestamp": 1', "line 5: line is .* expected a JSON object"),
        (MOONCAKE + "[1]", "line 5: line is"),
        (MOONCAKE.replace('"output_length": 20', '"output_length": "many"'), "line 1: output_length is 'many'"),
        (MOONCAKE.replace('"input_length": 40, ', ""), "line 4: input_length is missing"),
        (MOONCAKE.replace("[3]", "[3.5]"), "line 4: hash_ids"),
        (MOONCAKE.replace("3000", "NaN"), "line 2: timestamp is 'nan'"),
        (MOONCAKE.replace("1030", "true"), "line 2: input_length is 'True'"),
        (AZURE.replace("396", "-3"), "line 3: ContextTokens is '-3'; expected 0 to"),
        (AZURE.replace("2023-11-16 18:17:04.0319600", "yesterday"), "line 3: TIMESTAMP is 'yesterday'"),
        (AZURE.replace("879,55", "879"), "line 4: .* expected 3 fields"),
        (BURST.replace("417", "4.5"), "line 4: Request tokens is '4.5'; expected a whole number"),
        (BURST.replace("118.5", "inf"), "line 4: Timestamp is 'inf'"),
        (BURST.replace("118.5", "1e308"), "line 4: Timestamp is '1e.308'; expected a time between"),
        (MOONCAKE.replace("3000", "1" + "0" * 400), "line 2: timestamp is '10000.*; expected a time between"),
        (AZURE.replace("374", '"' + "9" * 200_000 + '"'), "line 2: line is .* expected fields separated by commas"),
        ('"' + "a" * 200_000 + '"\n1\n', "line 1 .* expected JSON objects"),
        (BURST.replace("118.5", "5.0000001"), "2 requests; expected two or more, at different times"),
        ("\n".join(AZURE.splitlines()[:2]), "1 requests; expected two or more"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line_and_field(tmp_path, text, said):
    with pytest.raises(InvalidRequest, match=said) as error:
        reading(tmp_path, text)
    assert error.value.param == "trace"


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path):
    with pytest.raises(InvalidRequest, match="No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"{\xff\xfe")
    with pytest.raises(InvalidRequest, match="no text"):
        read_trace(tmp_path / "binary")


def test_the_busiest_part_is_taken_and_a_rate_is_met(tmp_path):
    rows = [f"2023-11-16 18:{minute:02}:00,100,10" for minute in range(10)]
    rows[5:5] = [f"2023-11-16 18:04:{second:02},200,10" for second in range(10, 20)]
    trace = reading(tmp_path, "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    part = busiest_window(trace, 6)
    assert {each.prompt_tokens for each in part.arrivals} == {200}
    assert part.arrivals[0].at_s == 0
    assert busiest_window(trace, 1000) is trace
    fast = rescale_trace(trace, 12.5)
    assert fast.rate == pytest.approx(12.5)
    assert [each.prompt_tokens for each in fast.arrivals] == [each.prompt_tokens for each in trace.arrivals]


def test_a_synthetic_trace_is_the_same_for_the_same_seed():
    one = synthetic_trace("synthetic", 4.0, 100, 3)
    assert (len(one.arrivals), one.rate) == (100, pytest.approx(4.0))
    assert one == synthetic_trace("synthetic", 4.0, 100, 3)
    assert one != synthetic_trace("synthetic", 4.0, 100, 4)
    assert any(each.prefix[1] for each in synthetic_trace("synthetic-reuse", 4.0, 100, 3).arrivals)
