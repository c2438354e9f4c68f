"""One rank of the demo: an ordinary torch trainer that reads its batches from msd.

    RANK=0 WORLD_SIZE=4 python -m msd_client.msdctl.demo_trainer --job job.yaml --socket ... \
        --rendezvous FILE --dp 2 --tp 2

It writes one JSON object a line on stdout; the demo reads them. The only module of `msdctl` that
needs torch, and it runs as a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import msd_client
from msd_client.msdctl.demo_model import (
    Gpt,
    GptShape,
    TensorParallel,
    losses_of_tokens,
    sum_of_losses,
)
from msd_client.msdctl.demo_vision import Vlm, caption_losses

SEED = 17
LEARNING_RATE = 4e-3
WARMUP_STEPS = 15
GRADIENT_NORM_MAX = 1.0
VOCABULARY = 257
"""Bytes and the end of a document."""


@dataclass
class Clock:
    """Seconds of one step by what they were spent on."""

    last: float = 0.0

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


class GradientMean:
    """Averages gradients over data-parallel ranks, all of them and the figures in one all-reduce."""

    def __init__(self, model: Any, group: Any) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._group = group
        self.size = dist.get_world_size(group)
        """Data-parallel ranks."""

    def average(self, figures: Any) -> list[float]:
        """Average gradients in place; return the averages of `figures`, shape (n,)."""
        parts = [p.grad.reshape(-1) for p in self._parameters]
        flat = torch.cat([*parts, figures])
        dist.all_reduce(flat, group=self._group)
        flat /= self.size
        at = 0
        for parameter in self._parameters:
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
        averages: list[float] = flat[at:].tolist()
        return averages


class TextTask:
    """What the plain demo trains: the GPT on text."""

    def __init__(self, shape: GptShape, parallel: TensorParallel) -> None:
        self.model: Any = Gpt(shape, parallel, SEED)
        self.figures = torch.zeros(0)
        """Sums of the step that are told beside the loss."""

    def loss(self, batch: Any) -> Any:
        """Return the summed loss of a microbatch."""
        logits = self.model(batch.tokens, batch.position_ids, batch.segment_ids)
        return sum_of_losses(logits, batch.labels, int(batch.conventions["ignore_label"]))

    def told(self, totals: list[float]) -> dict[str, float]:
        """Return what rank 0 says of a step's figures, summed over the data-parallel ranks."""
        del totals
        return {}


class PictureTask:
    """What `--multimodal` trains: the GPT on text and on captions of the pictures it is shown."""

    def __init__(self, shape: GptShape, parallel: TensorParallel) -> None:
        self.model: Any = Vlm(shape, parallel, SEED)
        self.figures = torch.zeros(3)

    def loss(self, batch: Any) -> Any:
        """See TextTask."""
        ignore_label = int(batch.conventions["ignore_label"])
        pictures = batch.media("image")
        losses = losses_of_tokens(self.model(batch, pictures), batch.labels, ignore_label)
        self.figures += caption_losses(losses.detach(), batch, pictures, ignore_label)
        return losses.sum()

    def told(self, totals: list[float]) -> dict[str, float]:
        """See TextTask."""
        loss, tokens, pictures = totals
        return {"caption_loss_sum": loss, "caption_tokens": tokens, "pictures": pictures}


def main(arguments: list[str] | None = None) -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(prog="demo_trainer")
    parser.add_argument("--job", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--row-tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dp", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--multimodal", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # four ranks share a few cores
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    try:
        train(options)
        # Gloo's threads end with the last reference to a group; at the interpreter's exit it is too
        # late for them, and the process would abort.
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """Train to the end of the job's stream."""
    mesh = init_device_mesh("cpu", (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
    parallel = TensorParallel(mesh.get_group("tp"))
    shape = GptShape(VOCABULARY, options.row_tokens)
    task = PictureTask(shape, parallel) if options.multimodal else TextTask(shape, parallel)
    model = task.model
    means = GradientMean(model, mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    deadlines = {"next_batch_s": 30.0}  # nothing here takes long: hear of a fault soon
    with msd_client.connect(
        options.job, mesh=mesh, daemon=options.socket, deadlines=deadlines
    ) as data:
        rank = data.rank
        say(
            "joined",
            rank=rank,
            pid=os.getpid(),
            sources=data.train.sources,
            parameters=model.whole_size(),
        )
        clock = Clock(time.perf_counter())
        for step in data.train:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step.number, options.steps)
            scale = step.loss_scale("mean")
            loss = torch.zeros(())
            parallel.seconds = compute_s = 0.0
            for batch in step:
                began = time.perf_counter()
                part = task.loss(batch) * scale
                part.backward()
                loss += part.detach()
                del batch, part
                compute_s += time.perf_counter() - began
            began = time.perf_counter()
            mean_loss, *averages = means.average(torch.cat([loss.reshape(1), task.figures]))
            task.figures.zero_()
            averaged = time.perf_counter()
            clip_gradients(model, parallel)
            optimizer.step()
            optimizer.zero_grad()
            fields: dict[str, Any] = {
                "wait_s": step.stats["wait_s"],
                "compute_s": compute_s - parallel.seconds,
                "tp_s": parallel.seconds,
                "dp_s": averaged - began,
                "optimizer_s": time.perf_counter() - averaged,
            }
            if rank == 0:
                fields |= task.told([average * means.size for average in averages])
                fields |= {"loss": mean_loss, "valid_tokens": step.valid_tokens} | {
                    key: step.stats[key]
                    for key in ("fill", "imbalance", "drawn_tokens", "wanted_shares")
                }
            say("step", rank=rank, step=step.number, step_s=clock.lap(), **fields)
        say("ended", rank=rank)


def clip_gradients(model: Any, parallel: TensorParallel) -> None:
    """Clip by the norm over the whole model: parts of split weights count once each.

    Norms of replicated weights are equal on all tensor-parallel ranks, so each gives its share.
    """
    split = {id(p) for block in model.blocks for p in (*block.qkv, block.out, block.up, block.down)}
    squares = torch.zeros(())
    for parameter in model.parameters():
        share = 1.0 if id(parameter) in split else 1.0 / parallel.size
        squares += parameter.grad.square().sum() * share
    norm = math.sqrt(float(parallel.sum(squares)))
    if norm > GRADIENT_NORM_MAX:
        for parameter in model.parameters():
            parameter.grad.mul_(GRADIENT_NORM_MAX / norm)


def learning_rate(step: int, steps: int) -> float:
    """Return a linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    done = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def say(kind: str, **fields: Any) -> None:
    """Write one message for the demo."""
    sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
