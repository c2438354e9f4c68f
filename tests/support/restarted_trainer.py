"""A trainer on gloo ranks that is killed and started again on other numbers of ranks.

    python -m tests.support.restarted_trainer < asks

Reads one JSON ask a line, forks its ranks from a process that imported torch once, says their pids
in a JSON line, and says in another how it went. Like torchrun it ends all ranks once one is gone.

A small GPT, replicated. Gradients are kept of each row by itself, gathered from all ranks and added
in the order of the rows' content: the same order on any mesh, so the same bits. Each rank saves a
part of the model with the loader's state in one joint save. After each step a rank writes down which
rows it consumed and the loss: what is in the file behind a restart's first step was undone by it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import msd_client
from msd_client.msdctl.demo_model import Gpt, GptShape, TensorParallel, losses_of_tokens

SEED = 17
LEARNING_RATE, MOMENTUM = 0.3, 0.8


class Training:
    """A replicated model, its optimizer, and sums that no mesh changes."""

    def __init__(self, ask: dict[str, Any]) -> None:
        torch.manual_seed(SEED)
        shape = GptShape(ask["vocabulary"], ask["row_tokens"], width=16)
        self.model = Gpt(shape, TensorParallel(None), SEED).double()
        self.parameters = list(self.model.parameters())
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters]

    def row_gradient(self, batch: Any) -> tuple[Any, float]:
        """Return the gradient of a row's summed loss, flat, and that loss."""
        logits = self.model(batch.tokens, batch.position_ids, batch.segment_ids, None)
        loss = losses_of_tokens(logits, batch.labels, -100).sum()
        gradients = torch.autograd.grad(loss, self.parameters)
        return torch.cat([gradient.reshape(-1) for gradient in gradients]), float(loss.detach())

    def step(self, rows: list[tuple[str, Any, float]], valid_tokens: int) -> float:
        """Train one step on the rows of all ranks, in the order of their keys; return its loss."""
        rows = sorted(rows, key=lambda row: row[0])
        total = torch.zeros_like(rows[0][1])
        loss = 0.0
        for _, gradient, row_loss in rows:
            total += gradient
            loss += row_loss
        total /= valid_tokens
        at = 0
        with torch.no_grad():
            for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
                part = total[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
                momentum.mul_(MOMENTUM).add_(part)
                parameter.sub_(LEARNING_RATE * momentum)
        return loss / valid_tokens

    def part(self, rank: int, world: int) -> bytes:
        """Return what a rank saves of the model: every world-th parameter with its momentum."""
        buffer = io.BytesIO()
        kept = {
            number: (self.parameters[number].detach(), self.momenta[number])
            for number in range(rank, len(self.parameters), world)
        }
        torch.save(kept, buffer)
        return buffer.getvalue()

    def load(self, parts: list[bytes]) -> None:
        """Take all parts of a save, by however many ranks it was made."""
        loaded: set[int] = set()
        for part in parts:
            for number, (parameter, momentum) in torch.load(io.BytesIO(part)).items():
                with torch.no_grad():
                    self.parameters[number].copy_(parameter)
                self.momenta[number] = momentum
                loaded.add(number)
        assert loaded == set(range(len(self.parameters))), "a part of the model was lost"


def key_of(batch: Any) -> str:
    """Return what names a row: a digest of its tokens and labels."""
    digest = hashlib.sha256(batch.tokens.numpy().tobytes())
    digest.update(batch.labels.numpy().tobytes())
    return digest.hexdigest()


def gather(mine: list[tuple[str, Any, float]], world: int) -> list[tuple[str, Any, float]]:
    """Return the rows of all ranks; every rank has as many."""
    if world == 1:
        return mine
    flat = torch.stack([gradient for _, gradient, _ in mine])
    others = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(others, flat)
    told: list[Any] = [None] * world
    dist.all_gather_object(told, [(key, loss) for key, _, loss in mine])
    return [
        (key, others[rank][number], loss)
        for rank in range(world)
        for number, (key, loss) in enumerate(told[rank])
    ]


def train(ask: dict[str, Any], rank: int) -> None:
    """Go on from the newest save to the last step."""
    world = ask["dp"]
    states = msd_client.StateFolder(ask["states"], keep=2)
    training = Training(ask)
    with (
        open(f"{ask['out']}.{ask['segment']}.{rank}", "w") as told,
        msd_client.connect(
            ask["job"], mesh={"dp": world}, rank=rank, daemon=ask["daemon"], as_="torch"
        ) as data,
    ):
        newest = [states.newest() if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(newest, 0)  # one rank's choice is everyone's
        if newest[0] is not None:
            training.load([part["model"] for part in newest[0].parts])
            data.train.load_state_dict({"msd": newest[0].state["msd"]})
        for step in data.train:
            mine = []
            for batch in step:
                key = key_of(batch)
                mine.append((key, *training.row_gradient(batch)))
                del batch
            loss = training.step(gather(mine, world), step.valid_tokens)
            line = {"step": step.number, "rows": [key for key, _, _ in mine], "loss": loss.hex()}
            told.write(json.dumps(line) + "\n")
            told.flush()
            done = step.number + 1
            if done % ask["save_every"] == 0:
                state = {**data.train.state_dict(), "model": training.part(rank, world)}
                states.save(state, step=done, part=rank, parts=world, run=str(ask["segment"]))
            if done == ask["steps"]:
                break


def rank_main(ask: dict[str, Any], rank: int) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    store = f"file://{ask['out']}.{ask['segment']}.store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ask["dp"], timeout=timedelta(seconds=60)
    )
    train(ask, rank)
    dist.barrier()
    dist.destroy_process_group()


def serve() -> None:
    """Run one ask after the other."""
    for line in sys.stdin:
        ask = json.loads(line)
        pids = [_fork(ask, rank) for rank in range(ask["dp"])]
        print(json.dumps({"pids": pids}), flush=True)
        left = set(pids)
        statuses = []
        while left:
            pid, status = os.waitpid(-1, 0)
            left.discard(pid)
            statuses.append(os.waitstatus_to_exitcode(status))
            if statuses[-1]:
                for other in left:
                    os.kill(other, signal.SIGKILL)
        print(json.dumps({"statuses": statuses}), flush=True)


def _fork(ask: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        rank_main(ask, rank)
        status = 0
    except BaseException:  # noqa: BLE001 - told, and the process ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
