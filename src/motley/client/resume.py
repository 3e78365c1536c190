"""Tracker of a stream, so that it can be requested again from where it broke."""

from __future__ import annotations

import copy

from ..cluster.protos import inference_pb2 as pb
from .generate_requests import GenerateRequest

MAX_CHOICES = 1024


class Resume:
    """The request that continues a stream.

    request   what to request now: the original, later with seed, id and token ids so far
    started   whether any message has come: from then on a new request continues the stream
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request: GenerateRequest = copy.deepcopy(request)
        self.started = False
        choices = range(min(self._n, MAX_CHOICES))  # a service refuses more, but is asked only later
        self._ids: list[list[int]] = [list(ids.ids) for ids in request.output_ids] or [[] for _ in choices]
        self._given = self._num_ids
        self._ended: set[int] = set()
        self._prompt_seen = False
        self._weights: pb.Weights | None = None  # weights of the latest chunk that the caller has seen
        self._others: pb.Weights | None = None  # weights of the next chunk, if they differ

    def take(self, chunk: pb.CompletionChunk) -> list[pb.CompletionChunk]:
        """Return the chunk as the caller is to see it; an empty list if it has seen all of it before."""
        if chunk.HasField("started"):
            self.request.sampling.seed = chunk.started.seed
            self.request.request_id = self.request.request_id or chunk.started.request_id
            if self.started:
                return []
            self.started = True
        if self._prompt_seen:
            del chunk.prompt_logprobs[:]
        self._prompt_seen |= bool(chunk.prompt_logprobs)
        new = [choice for choice in chunk.choices if self._is_new(choice)]
        for choice in new:
            self._ids[choice.index] += choice.token_ids
            if choice.finish_reason:
                self._ended.add(choice.index)
        if len(new) < len(chunk.choices):  # a choice that had ended says so again
            weights = chunk.weights if chunk.HasField("weights") else None
            chunk = pb.CompletionChunk(choices=new, prompt_logprobs=chunk.prompt_logprobs, weights=weights)
        self._set_changed_weights(chunk)
        if chunk.HasField("usage"):
            chunk.usage.completion_tokens = self._num_ids - self._given
        return [chunk] if chunk.ListFields() else []

    def _set_changed_weights(self, chunk: pb.CompletionChunk) -> None:
        """Set the chunk's weights only when the caller has something new: once, and again if they have changed."""
        if chunk.HasField("weights"):
            self._others = None if _same(chunk.weights, self._weights) else copy.copy(chunk.weights)
            chunk.ClearField("weights")
        if self._others is not None and (chunk.choices or chunk.prompt_logprobs):
            chunk.weights.CopyFrom(self._others)
            self._weights, self._others = self._others, None

    def _is_new(self, choice: pb.Choice) -> bool:
        """Return whether the choice is new to the caller. One that a lost replica cut off has not ended: the error
        decides.
        """
        return choice.index not in self._ended and choice.finish_reason != pb.FINISH_REASON_REPLICA_LOST

    def rest(self) -> GenerateRequest:
        """Return the request for what has not come yet."""
        if self.started:
            del self.request.output_ids[:]
            self.request.output_ids.extend(pb.TokenIds(ids=ids) for ids in self._ids)
        return self.request

    @property
    def _num_ids(self) -> int:
        return sum(map(len, self._ids))

    @property
    def _n(self) -> int:
        return self.request.sampling.n if self.request.sampling.HasField("n") else 1


def _same(weights: pb.Weights, others: pb.Weights | None) -> bool:
    if others is None:
        return False
    return weights.contents == others.contents if weights.contents else weights == others
