"""The demo as a user starts it, and its tensor parallelism against one process."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.node import wait_until
from tests.support.sources import ROOT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


def start(*arguments: str, tmp_path, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "msd_client.msdctl.main", "demo", *arguments]
    environ = {**os.environ, "TMPDIR": str(tmp_path)} if len(str(tmp_path)) < 40 else None
    return subprocess.Popen(command, cwd=ROOT, text=True, env=environ, **options)


def test_a_short_demo_ends_well(tmp_path):
    process = start(
        "--steps", "12", "--json", tmp_path=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["schema"] == "msd.demo/1"
    assert report["faults"] == report["left_behind"] == []
    assert report["steps"] == 12
    assert report["loss_end"] < report["loss_start"]
    assert report["fill_pct"] > 90
    assert 1 <= report["mixture_changed_at"] < 12
    after = report["mixture_after"]
    assert after["first_step"] == report["mixture_changed_at"]
    assert after["wanted"] != report["mixture_before"]["wanted"]
    assert report["memory_shared_bytes"] > 0
    assert report["loader_processes"] >= 6
    assert "step   12/12" in err


def test_a_short_demo_with_pictures_ends_well(tmp_path):
    arguments = ["--multimodal", "--steps", "12", "--json"]
    process = start(*arguments, tmp_path=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["faults"] == report["left_behind"] == []
    assert report["steps"] == 12
    assert report["caption_loss_end"] < report["caption_loss_start"]
    assert 12 * 8 < report["pictures"] < 12 * 80
    share = report["mixture_before"]["wanted"]["pictures"]
    assert share == pytest.approx(0.5, abs=1e-6)
    assert "captions" in err


def test_ctrl_c_ends_everything(tmp_path):
    log = tmp_path / "out"
    # Where the tests themselves run in the background of a shell, SIGINT is ignored: not by a child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as out:
        process = start(tmp_path=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: "loss" in log.read_text(), "the first step", 60)
            process.send_signal(signal.SIGINT)
            assert process.wait(40) == 130
        finally:
            process.kill()
            process.wait()
    text = log.read_text()
    assert "interrupted after" in text
    assert "Left behind: no process and no name in /dev/shm" in text


PROGRAM = textwrap.dedent(
    """
    import gc, sys, numpy as np, torch, torch.distributed as dist
    from msd_client.msdctl.demo_model import Gpt, GptShape, TensorParallel, sum_of_losses

    def figures(group):
        model = Gpt(GptShape(257, 32, layers=2, width=16, heads=4), TensorParallel(group), seed=3)
        rng = np.random.default_rng(0)
        tokens = torch.from_numpy(rng.integers(0, 257, (2, 32)).astype(np.int32))
        segments = torch.from_numpy(np.repeat([[0, 1, 1, 2]], 8, axis=1).reshape(1, 32).repeat(2, 0))
        labels = tokens.roll(-1, 1).long()
        labels[:, ::7] = -100
        loss = sum_of_losses(model(tokens, torch.arange(32).expand(2, -1), segments), labels, -100)
        loss.backward()
        norm = model.blocks[0].norm_hidden
        whole = model.embedding.grad.square().sum() + norm.weight.grad.square().sum()
        parts = [p for b in model.blocks for p in (*b.qkv, b.out, b.up, b.down)]
        split = sum(p.grad.square().sum() for p in parts)
        if group is not None:
            dist.all_reduce(split)
        return loss.item(), whole.item(), split.item()

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if size > 1:
        dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=size)
    print(*figures(dist.group.WORLD if size > 1 else None))
    if size > 1:
        gc.collect()  # gloo's threads must end before the interpreter does
        dist.barrier()
        dist.destroy_process_group()
    """
)


def test_two_tensor_parallel_ranks_give_the_gradients_of_one(tmp_path):
    def run(size: int) -> list[float]:
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(rank), str(size), str(tmp_path / f"meet{size}")],
                stdout=subprocess.PIPE, env=environ, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks)
        return [float(part) for part in outputs[0].split()]

    assert run(2) == pytest.approx(run(1), rel=1e-10)
