"""Calls of the published stubs of vllm.grpc.engine. Argument: the address of a service."""

import hashlib
import io
import sys
import zipfile

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

channel = grpc.insecure_channel(sys.argv[1])
stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)


def status(call):
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise SystemExit("an error was expected")


info = stub.GetModelInfo(pb.GetModelInfoRequest())
assert info.served_model_name == "tiny"
assert info.is_generation
assert info.max_context_length == 65536
assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
server = stub.GetServerInfo(pb.GetServerInfoRequest())
assert server.server_type == "vllm-grpc"
loads = stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
assert loads.dp_rank_count == server.data_parallel_size == 1
assert loads.loads[0].max_total_num_tokens > 0


def ask(stream, **sampling):
    given = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **sampling}
    tokenized = pb.TokenizedInput(original_text="abc", input_ids=range(64, 64 + 40))
    params = pb.SamplingParams(skip_special_tokens=True, **given)
    return pb.GenerateRequest(request_id="one", tokenized=tokenized, sampling_params=params, stream=stream)


# KV events of what follows
events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(load_records_before_first_batch=True))
assert next(events).load.load_only
[whole] = stub.Generate(ask(False, logprobs=2))
whole = whole.complete
assert len(whole.output_ids) == 24
assert whole.finish_reason == "length"
assert whole.prompt_tokens == 40
assert list(whole.output_logprobs.token_ids) == list(whole.output_ids)
assert [len(top.token_ids) for top in whole.output_logprobs.top_logprobs] == [2] * 24
# what earlier calls have left in the cache may go first
stored = next(event.stored for batch in events for event in batch.events if event.HasField("stored"))
assert list(stored.blocks[0].token_ids) == list(range(64, 80))
assert stored.blocks[0].block_size == 16

responses = list(stub.Generate(ask(True, n=2, logprobs=2)))
for index in (0, 1):
    chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.index == index]
    [complete] = [r.complete for r in responses if r.HasField("complete") and r.complete.index == index]
    assert [i for chunk in chunks for i in chunk.token_ids] == list(complete.output_ids) == list(whole.output_ids)
    assert [i for chunk in chunks for i in chunk.output_logprobs.token_ids] == list(complete.output_ids)
    assert not complete.HasField("output_logprobs")
    assert complete.cached_tokens == 32, complete.cached_tokens
assert stub.FlushCache(common_pb2.FlushCacheRequest()).success
hashes = {block.block_hash for block in stored.blocks}
while hashes:
    for event in next(events).events:  # more than a subscriber has room for are told as all
        hashes = set() if event.HasField("cleared") else hashes - set(event.removed.block_hashes)
events.cancel()
[cold] = stub.Generate(ask(False))
assert cold.complete.cached_tokens == 0

[answer] = stub.Generate(ask(False, max_tokens=64, regex="yes|no", ignore_eos=False))
assert answer.complete.finish_reason == "stop"

call = stub.Generate(ask(True, max_tokens=60000))
next(call)
stub.Abort(pb.AbortRequest(request_ids=["one"]))
assert [r.complete.finish_reason for r in call if r.HasField("complete")] == ["abort"]

chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
archive = b"".join(chunk.data for chunk in chunks)
assert hashlib.sha256(archive).hexdigest() == chunks[-1].sha256
assert "tokenizer.json" in zipfile.ZipFile(io.BytesIO(archive)).namelist()

embedded = stub.Embed(pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=[1, 2, 3])))
assert embedded.embedding_dim == len(embedded.embedding) > 0
assert embedded.prompt_tokens == 3
assert abs(sum(value * value for value in embedded.embedding) - 1) < 1e-4

code, details = status(lambda: list(stub.Generate(ask(True, top_p=2.0))))
assert code is grpc.StatusCode.INVALID_ARGUMENT, code
assert details.startswith("sampling_params.top_p: "), details
code, _ = status(lambda: stub.StartProfile(common_pb2.StartProfileRequest()))
assert code is grpc.StatusCode.UNIMPLEMENTED
print("done")
