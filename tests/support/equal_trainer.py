"""A trainer on gloo ranks that trains several models on the same batches, and tells their losses.

    python -m tests.support.equal_trainer '[{"job": ..., "daemon": ..., "dp": 2, ...}, ...]'

Models differ by dtype and by how they normalise the loss. `global`: summed loss times
`step.loss_scale("mean")`, as msd means it. `own`: each rank's mean over its own labels, as trainers
do that know no count of the step; gradients are averaged over ranks either way. What is told of
either is the true mean loss of the step, over the labels of all ranks, before its update.
Ranks are forked from a process that imported torch once and did nothing with it.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import msd_client
from msd_client.msdctl.demo_model import Gpt, GptShape, TensorParallel, losses_of_tokens
from tests.support.rank_forks import fork_ranks

SEED = 11
# At 0.3 the loss jumps at step 19, and magnifies roundings.
LEARNING_RATE, MOMENTUM = 0.2, 0.8
KINDS = {
    "float64": (torch.float64, "global"),
    "float32": (torch.float32, "global"),
    "own": (torch.float64, "own"),
}


class Pictures(nn.Module):
    """Patches to vectors: each patch, and the mean of its image's patches."""

    def __init__(self, values: int, width: int) -> None:
        super().__init__()
        self.patch, self.out = nn.Linear(values, width), nn.Linear(width, width)

    def forward(self, media: Any) -> Any:
        pixels = media.patches.to(self.patch.weight.dtype) / 127.5 - 1
        x = torch.tanh(self.patch(pixels))
        parts = [
            x[begin:end] + x[begin:end].mean(0)
            for begin, end in pairwise(media.cu_seqlens.tolist())
        ]
        return self.out(torch.cat(parts)) if parts else self.out(x)


class Model(nn.Module):
    """The demo's GPT, small; with pictures where the job has them."""

    def __init__(self, ask: dict[str, Any], dtype: Any) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        shape = GptShape(ask["vocabulary"], ask["positions"], width=32)
        self.gpt = Gpt(shape, TensorParallel(None), SEED)
        self.pictures = Pictures(ask["patch_values"], 32) if ask["patch_values"] else None
        self.to(dtype)

    def loss_sum(self, batch: Any) -> Any:
        """Return the summed loss of a microbatch, each label's times its weight."""
        added = None
        if self.pictures is not None:
            media = batch.media("image")
            places, numbers = batch.local_places("image")
            added = (places, self.pictures(media)[numbers])
        logits = self.gpt(batch.tokens, batch.position_ids, batch.segment_ids, added)
        losses = losses_of_tokens(logits, batch.labels, -100)
        return (losses * batch.loss_weights).sum() if "loss_weights" in batch else losses.sum()


def weight_of(batch: Any) -> float:
    """Return the sum of the weights of a microbatch's labels."""
    if "loss_weights" in batch:
        return float(batch.loss_weights.double().sum())
    return float((batch.labels != -100).sum())


class Trained:
    """One model in training."""

    def __init__(self, ask: dict[str, Any], kind: str) -> None:
        dtype, self.norm = KINDS[kind]
        self.model = Model(ask, dtype)
        # Not Adam: it divides gradients by their size, and would hide one that is off by a factor.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        self.losses: list[float] = []

    def step(self, batches: list[Any], scale: float, own_weight: float, weight: float) -> None:
        """Train one step.

        Args:
            batches: This rank's microbatches.
            scale: `step.loss_scale("mean")`.
            own_weight: Sum of label weights on this rank.
            weight: Sum over all ranks.
        """
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = self.model.loss_sum(batch)
            total += loss.detach().double()
            (loss * (scale if self.norm == "global" else 1 / max(own_weight, 1.0))).backward()
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in self.model.parameters()])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        at = 0
        for parameter in self.model.parameters():
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
        dist.all_reduce(total)
        self.losses.append(float(total) / weight)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(ask: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train every kind of model on the job's first steps; return losses and what the rank got."""
    trained = {kind: Trained(ask, kind) for kind in ask["kinds"]}
    got: list[list[int]] = []
    microbatches: list[int] = []
    with msd_client.connect(
        ask["job"], mesh={"dp": ask["dp"]}, rank=rank, daemon=ask["daemon"], as_="torch"
    ) as data:
        for step in data.train:
            # Kept: every model reads them.
            batches = [batch.clone() for batch in step]
            if ask["is_trimmed"]:
                batches = [batch.trimmed() for batch in batches]
            own_weight = sum(map(weight_of, batches))
            weights = torch.tensor([own_weight], dtype=torch.float64)
            dist.all_reduce(weights)
            weight = float(weights[0])
            assert abs(weight - step.loss_weight) <= 1e-6 * weight, (weight, step.loss_weight)
            scale = step.loss_scale("mean")
            for one in trained.values():
                one.step(batches, scale, own_weight, weight)
            got.append([batch.used_tokens for batch in batches])
            microbatches.append(step.microbatches)
            if len(got) == ask["steps"]:
                break
    losses = {kind: one.losses for kind, one in trained.items()}
    return {"losses": losses, "used_tokens": got, "microbatches": microbatches}


def rank_main(ask: dict[str, Any], rank: int) -> None:
    """Run one rank and write what it tells."""
    torch.set_num_threads(1)
    store = f"file://{ask['out']}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ask["dp"])
    told = train(ask, rank)
    with open(f"{ask['out']}.{rank}", "w") as file:
        json.dump(told, file)
    dist.barrier()
    dist.destroy_process_group()


def run(ask: dict[str, Any]) -> int:
    """Fork the ranks of a run and wait for them; return the worst status."""
    return fork_ranks(lambda rank: rank_main(ask, rank), ask["dp"])


if __name__ == "__main__":
    sys.exit(max(run(ask) for ask in json.loads(sys.argv[1])))
