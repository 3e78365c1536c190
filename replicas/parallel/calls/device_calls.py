"""Calls of a decoder as ranks on GPUs receive them: what the host knows by the pipe, what is on the device by an
exchange.

A step that is planned ahead has tokens that only the first rank's device knows, and a graph reads all of its numbers
from the device. So they go from device to device, in one tensor, and no host waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....kernels.batch import StepBatch
from ...model.decoder import Decoder
from ..transport.collective import CollectiveExchange


def call_fields(method: str, argument: StepBatch | torch.Tensor, version: int = 0) -> dict[str, Any]:
    """Return the part of a decoder's call that the host knows, as JSON fields: the method, and the shape of a step or
    of hidden states.

    version  version of the decoder's weights
    """
    if isinstance(argument, torch.Tensor):
        return {"method": method, "weights": version, "hidden": list(argument.shape)}
    return {
        "method": method,
        "weights": version,
        "query_starts": argument.query_starts,
        "context_lens": argument.context_lens,
        "num_decodes": argument.num_decodes,
        "table": list(argument.block_tables.shape),
        "rows": len(argument.logit_rows),
        "lengths": argument.lengths is not None,
    }


def send_call(argument: StepBatch | torch.Tensor, exchange: CollectiveExchange) -> None:
    """Broadcast the part of a call that is on the device to the other ranks, as work of the device."""
    exchange.broadcast(argument.contiguous() if isinstance(argument, torch.Tensor) else _pack_batch(argument))


def execute_device_call(
    fields: Mapping[str, Any],
    decoder: Decoder,
    kv: list[torch.Tensor],
    exchange: CollectiveExchange,
) -> torch.Tensor:
    """Make the call of which the first rank has sent `fields`, with the tensors that it broadcasts, as work of the
    device.

    decoder  of the version of the weights that `fields` name
    """
    method: Callable[..., torch.Tensor] = getattr(decoder, fields["method"])
    device = decoder.ops.device
    if "hidden" in fields:
        hidden = torch.empty(fields["hidden"], dtype=decoder.ops.dtype, device=device)
        return method(exchange.broadcast(hidden))
    return method(_unpack_batch(fields, device, exchange), kv)


def _pack_batch(batch: StepBatch) -> torch.Tensor:
    """Return a batch's tensors as one int32 vector: block tables, lengths if there are any, token ids, positions,
    slots, rows of logits.
    """
    parts = [batch.block_tables.flatten(), *([] if batch.lengths is None else [batch.lengths])]
    parts += [part.to(torch.int32) for part in (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)]
    return torch.cat(parts)


def _unpack_batch(fields: Mapping[str, Any], device: torch.device, exchange: CollectiveExchange) -> StepBatch:
    """Receive the tensors of a batch and return it. Each part has memory of its own, with the alignment that kernels
    need.
    """
    sequences, blocks = fields["table"]
    tokens = fields["query_starts"][-1]
    sizes = [sequences * blocks, sequences * fields["lengths"], tokens, tokens, tokens, fields["rows"]]
    packed = exchange.broadcast(torch.empty(sum(sizes), dtype=torch.int32, device=device))
    table, lengths, *others = torch.split(packed, sizes)
    token_ids, positions, slots, rows = (part.long() for part in others)
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=tuple(fields["query_starts"]),
        context_lens=tuple(fields["context_lens"]),
        block_tables=table.view(sequences, blocks),
        logit_rows=rows,
        num_decodes=fields["num_decodes"],
        lengths=lengths.clone() if fields["lengths"] else None,
    )
