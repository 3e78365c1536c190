"""Training of the demo model: the token stream of all epochs, the optimizers, and the training loop.

The same corpus, library versions and CPU instruction set give the same bytes: the seeds and the division of each batch
are fixed, and only deterministic algorithms run.

Each batch is divided among worker threads with one torch thread each, instead of each operator among torch's threads:
on a machine that others use too, operators that wait for a preempted thread made training ten times slower.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen2Config, Qwen2ForCausalLM

from .demo_corpus import Chat, plain
from .demo_recipe import Recipe
from .demo_tokenizer import render

END_OF_TEXT_ID = 0


class TokenStream:
    """Endless stream of training tokens: shuffled epochs of documents and chats, each ended by ``<|endoftext|>``."""

    def __init__(self, documents: list[str], chats: list[Chat], tokenizer: Tokenizer, recipe: Recipe):
        self._quoted = [tokenizer.encode(text).ids for text in documents]
        self._plain = [tokenizer.encode(plain(text)).ids for text in documents]
        self._chats = [tokenizer.encode(render(chat)).ids for chat in chats]
        self._random = random.Random(recipe.seed)
        self._recipe = recipe
        self._tokens = self._endless()
        self.document_tokens = sum(map(len, self._quoted))

    def _epoch(self) -> list[list[int]]:
        pick = self._random.random
        examples = [
            bare if pick() < self._recipe.plain_share else quoted
            for quoted, bare in zip(self._quoted, self._plain, strict=True)
        ]
        examples += [chat for chat in self._chats if pick() < self._recipe.chat_share]
        self._random.shuffle(examples)
        return examples

    def _endless(self) -> Iterator[int]:
        while True:
            for example in self._epoch():
                yield from example
                yield END_OF_TEXT_ID

    def batch(self, sequences: int, length: int) -> Tensor:
        """Return the next batch, int64 [sequences, length + 1]: inputs and, shifted by one, targets."""
        rows = [[next(self._tokens) for _ in range(length + 1)] for _ in range(sequences)]
        return torch.tensor(rows)


def build_model(recipe: Recipe) -> Qwen2ForCausalLM:
    """Return a new fp32 model with random weights, in training mode."""
    torch.manual_seed(recipe.seed)
    return Qwen2ForCausalLM(Qwen2Config(**recipe.model_config())).train()


class Dropout:
    """Dropout on the embedding and on each residual branch, with its own random numbers for each part of a batch."""

    def __init__(self, model: Qwen2ForCausalLM, recipe: Recipe):
        self._share = recipe.dropout
        self._generators = [torch.Generator().manual_seed(recipe.seed + 1 + i) for i in range(recipe.threads)]
        self._thread = threading.local()
        layers = [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]
        self._handles = [part.register_forward_hook(self._drop) for part in (model.model.embed_tokens, *layers)]

    def use(self, shard: int) -> None:
        """Let the calling thread draw the random numbers of this part of the batch."""
        self._thread.generator = self._generators[shard]

    def remove(self) -> None:
        """Remove the dropout, which leaves the model as it was before."""
        for handle in self._handles:
            handle.remove()

    def _drop(self, module: nn.Module, _: Any, output: Any) -> Any:
        if not module.training:
            return output
        values = output[0] if isinstance(output, tuple) else output
        keep = torch.empty_like(values).bernoulli_(1 - self._share, generator=self._thread.generator)
        dropped = values * keep.div_(1 - self._share)
        return (dropped, *output[1:]) if isinstance(output, tuple) else dropped


def build_optimizers(model: nn.Module, recipe: Recipe) -> list[Optimizer]:
    """Return Muon optimizers of the hidden matrices, one for each thread, and an AdamW for all other parameters."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    hands = [matrices[i :: recipe.threads] for i in range(recipe.threads)]
    return [
        *(Muon(hand, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, momentum=0.95) for hand in hands),
        AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def rate_factor(step: int, recipe: Recipe) -> float:
    """Return the learning rate's factor at a step: warm-up, plateau, then linear decay to zero (WSD)."""
    decay_steps = recipe.decay_share * recipe.steps
    return min(1.0, (step + 1) / recipe.warmup_steps, (recipe.steps - step) / decay_steps)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy in nats; tokens are int64 [B, T+1]."""
    # Without its cache autocast shares nothing between threads; every matrix is used once per pass anyway.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        logits = model(tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def set_gradients(model: nn.Module, dropout: Dropout, tokens: Tensor, threads: int, pool: Executor) -> float:
    """Set ``.grad`` to the gradients of the batch's mean loss, with one thread for each part; return that loss."""
    parameters = list(model.parameters())

    def shard_gradients(shard: int, rows: Tensor) -> tuple[float, tuple[Tensor, ...]]:
        dropout.use(shard)
        loss = loss_of(model, rows)
        return loss.item(), torch.autograd.grad(loss, parameters)

    losses, gradients = zip(*pool.map(shard_gradients, range(threads), tokens.chunk(threads)), strict=True)
    for parameter, *parts in zip(parameters, *gradients, strict=True):
        parameter.grad = torch.stack(parts).mean(0)
    total: float = sum(losses)
    return total / threads


def train(
    stream: TokenStream,
    recipe: Recipe,
    held_out_loss: Callable[[Qwen2ForCausalLM], float],
    log: Callable[[str], None] = print,
) -> tuple[Qwen2ForCausalLM, list[dict[str, float]]]:
    """Train the model from scratch; return it (fp32, eval mode) and the curve of logged losses."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs 5%
    model = build_model(recipe)
    dropout, optimizers = Dropout(model, recipe), build_optimizers(model, recipe)
    schedules = [LambdaLR(optimizer, lambda step: rate_factor(step, recipe)) for optimizer in optimizers]
    curve: list[dict[str, float]] = []
    started, smooth = time.monotonic(), 0.0
    with ThreadPoolExecutor(recipe.threads, initializer=lambda: torch.set_num_threads(1)) as pool:
        for step in range(1, recipe.steps + 1):
            shape = recipe.long_batch if step % recipe.long_every == 0 else recipe.short_batch
            loss = set_gradients(model, dropout, stream.batch(*shape), recipe.threads, pool)
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            list(pool.map(lambda optimizer: optimizer.step(), optimizers))
            for schedule in schedules:
                schedule.step()
            smooth = loss if step == 1 else 0.95 * smooth + 0.05 * loss
            if step % 100 == 0 or step == recipe.steps:
                point = {"step": step, "train": round(smooth, 4), "held_out": round(held_out_loss(model.eval()), 4)}
                model.train()
                curve.append(point)
            if step % 20 == 0 or step == recipe.steps:
                log(f"step {step}/{recipe.steps} loss {smooth:.4f} {time.monotonic() - started:.0f} s {curve[-1:]}")
    dropout.remove()
    return model.eval(), curve
