"""Ranks that encode media, exchange embeddings by gloo and train: `python -m ... '{"job": ...}'`.

They are forked from one process that imported torch once and did nothing with it. Each rank leaves
`OUT.RANK.npz`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.node import Node
from tests.support.rank_forks import fork_ranks
from tests.support.sources import ROOT

MODALITIES = ("image", "audio")
VALUES = {"image": 192, "audio": 16}
"""Values of a unit in `media_corpus`: 8 x 8 x 3, and 16 mel bins."""
WIDTH = 8
VOCABULARY = 512
"""Ids are taken modulo it: a softmax over all words would be most of the test."""
RATE = 0.5


def run_program(node: Node, folder: Path, **ask: Any) -> list[dict[str, Any]]:
    """Run the ranks of a mesh; return what each left.

    Args:
        node: The daemon.
        folder: For what they leave.
        ask: job, mesh, steps; kind (marks or train), dtypes.
    """
    ask = {"daemon": str(node.socket), "out": str(folder / "out"), **ask}
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.hybrid_ranks", json.dumps(ask)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + node.log[-2000:]
    world = int(np.prod(list(ask["mesh"].values())))
    return [dict(np.load(f"{ask['out']}.{rank}.npz")) for rank in range(world)]


def item_means(media: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the mean of each item's units, shape (items, values), and its embeddings (items,)."""
    import torch

    units = media.patches.to(dtype)
    sizes = (media.cu_seqlens[1:] - media.cu_seqlens[:-1]).long()
    item = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    sums = units.new_zeros((len(sizes), units.shape[1])).index_add(0, item, units)
    counts = (media.cu_embeddings[1:] - media.cu_embeddings[:-1]).long()
    return sums / sizes[:, None], counts


def marks_of(media: Any) -> Any:
    """Return an embedding a placeholder token that tells its item and its number there."""
    import torch

    means, counts = item_means(media, torch.float64)
    item = torch.repeat_interleave(torch.arange(len(counts)), counts)
    number = torch.arange(len(item)) - (counts.cumsum(0) - counts)[item]
    return torch.cat([means[item], 1.0 + number[:, None]], 1)


def read_marks(data: Any, ask: dict[str, Any], group: Any) -> dict[str, Any]:
    """Return what lies at every place of this rank's tokens, and what it encoded."""
    import torch

    from msd_client.embedding_exchange import place_embeddings

    left: dict[str, Any] = {}
    for step in data.train:
        for mb in step:
            key = f"{step.number}.{mb.microbatch}"
            left[f"tokens.{key}"] = mb.tokens.numpy().copy()
            for name in MODALITIES:
                media = mb.media(name)
                marks = marks_of(media)
                empty = torch.zeros((*mb.tokens.shape, marks.shape[1]), dtype=marks.dtype)
                placed = place_embeddings(empty, mb, name, marks, group, is_trained=False)
                left[f"{name}.{key}"] = placed.numpy()
                left[f"{name}_units.{key}"] = media.cu_seqlens.numpy().copy()
            del mb, media
        if step.number == ask["steps"] - 1:
            return left
    raise AssertionError("the stream ended")


def make_model(dtype: Any) -> Any:
    """Return a tiny vision-language model, the same on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(VOCABULARY, WIDTH),
            "qkv": nn.Linear(WIDTH, 3 * WIDTH),
            "hidden": nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY)
            ),
            **{
                name: nn.Sequential(
                    nn.Linear(VALUES[name], WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
                )
                for name in MODALITIES
            },
        }
    )
    return model.to(dtype)


def loss_of(model: Any, mb: Any, group: Any, dtype: Any) -> Any:
    """Return the summed loss of a microbatch."""
    import torch
    from torch.nn import functional

    from msd_client.embedding_exchange import place_embeddings

    x = model["embed"](mb.tokens % VOCABULARY)
    for name in MODALITIES:
        means, counts = item_means(mb.media(name), dtype)
        item = torch.repeat_interleave(torch.arange(len(counts)), counts)
        vectors = model[name](means / (256 if name == "image" else 8))[item]
        x = place_embeddings(x, mb, name, vectors, group)
    q, k, v = model["qkv"](x)[:, None].chunk(3, -1)
    seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mb.sdpa_mask())
    logits = model["hidden"](x + seen[:, 0])
    labels = torch.where(mb.labels < 0, mb.labels, mb.labels % VOCABULARY)
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


class Training:
    """A model in one precision, and its losses."""

    def __init__(self, dtype: str) -> None:
        import torch

        self.dtype = getattr(torch, dtype)
        self.model = make_model(self.dtype)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self._name = dtype
        self._losses: list[float] = []
        self._gradients: dict[str, Any] = {}
        self.start_step()

    def start_step(self) -> None:
        import torch

        self._optimizer.zero_grad(set_to_none=False)
        self._loss = torch.zeros((), dtype=self.dtype)

    def add(self, mb: Any, group: Any, scale: float) -> None:
        loss = loss_of(self.model, mb, group, self.dtype) * scale
        loss.backward()
        self._loss += loss.detach()

    def end_step(self) -> None:
        import torch.distributed as dist

        named = list(self.model.named_parameters())
        for tensor in (self._loss, *(parameter.grad for _, parameter in named)):
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
        if not self._losses:
            self._gradients = {f"grad.{name}": p.grad.numpy().copy() for name, p in named}
        self._losses.append(float(self._loss))
        self._optimizer.step()

    def result(self) -> dict[str, Any]:
        """Return the loss of each step, the gradients of the first, and the weights at the end."""
        weights = {f"weight.{n}": p.detach().numpy() for n, p in self.model.named_parameters()}
        found = {"losses": np.array(self._losses), **self._gradients, **weights}
        return {f"{self._name}.{key}": value for key, value in found.items()}


def train(data: Any, ask: dict[str, Any], group: Any) -> dict[str, Any]:
    """Train a model of each precision on the same batches."""
    trainings = [Training(dtype) for dtype in ask["dtypes"]]
    for step in data.train:
        for training in trainings:
            training.start_step()
        for mb in step:
            for training in trainings:
                training.add(mb, group, step.loss_scale("mean"))
            del mb
        for training in trainings:
            training.end_step()
        if step.number == ask["steps"] - 1:
            return {key: value for own in trainings for key, value in own.result().items()}
    raise AssertionError("the stream ended")


def rank_main(ask: dict[str, Any], rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    import msd_client
    from msd_client.mesh import dp_peers

    torch.set_num_threads(1)
    store = f"file://{ask['out']}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    # Enumerated among all ranks: each of them makes every group.
    group, _ = dist.new_subgroups_by_enumeration(dp_peers(ask["mesh"]))
    with msd_client.connect(
        ask["job"], mesh=ask["mesh"], rank=rank, daemon=ask["daemon"], as_="torch"
    ) as data:
        left = (read_marks if ask["kind"] == "marks" else train)(data, ask, group)
        dist.barrier()
    np.savez(f"{ask['out']}.{rank}.npz", **left)
    dist.destroy_process_group()


def main() -> int:
    import torch  # noqa: F401 - once, before the forks

    ask = json.loads(sys.argv[1])
    world = int(np.prod(list(ask["mesh"].values())))
    return fork_ranks(lambda rank: rank_main(ask, rank, world), world)


if __name__ == "__main__":
    sys.exit(main())
