"""States on disk: the newest whole one is found, whatever was killed, cut or flipped."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import msd_client
from msd_client.contract.errors import ConfigError, ResourceError, UsageError
from msd_client.state_folder import StateFolder


def state_of(step: int, part: int = 0) -> dict[str, bytes]:
    return {"msd": f"state {step} of {part}".encode() * 40, "model": bytes([step % 251]) * 3000}


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "states")


def test_the_newest_is_what_was_saved_last(folder: StateFolder) -> None:
    assert folder.newest() is None
    for step in (0, 7, 12):
        path = folder.save(state_of(step), step=step)
        assert path.is_file()
        saved = StateFolder(folder.path).newest()
        assert saved is not None
        assert (saved.step, saved.state, saved.skipped) == (step, state_of(step), ())
    assert msd_client.StateFolder is StateFolder


def test_values_may_be_any_bytes_and_empty(folder: StateFolder) -> None:
    folder.save({"a": b"", "b": bytearray(b"xy"), "c": memoryview(b"z" * 9)}, step=1)  # type: ignore[dict-item]
    assert folder.newest().state == {"a": b"", "b": b"xy", "c": b"z" * 9}  # type: ignore[union-attr]
    folder.save({}, step=2)
    assert folder.newest().state == {}  # type: ignore[union-attr]


def test_only_so_many_steps_are_kept(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, keep=2)
    for step in range(1, 8):
        for part in (2, 1, 0):
            folder.save(state_of(step, part), step=step, part=part, parts=3)
    assert len(os.listdir(tmp_path)) == 6
    assert folder.newest().parts == tuple(state_of(7, part) for part in range(3))  # type: ignore[union-attr]


def test_a_step_counts_once_all_its_parts_are_there(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    for part in range(4):
        folder.save(state_of(5, part), step=5, part=part, parts=4)
    for part in (0, 1, 3):
        folder.save(state_of(6, part), step=6, part=part, parts=4)
        with caplog.at_level(logging.WARNING):
            saved = folder.newest()
        assert saved is not None
        assert saved.step == 5
        assert saved.parts == tuple(state_of(5, part) for part in range(4))
    assert "parts 2 of 4 were not saved" in saved.skipped[-1]
    assert saved.skipped[-1] in caplog.text
    folder.save(state_of(6, 2), step=6, part=2, parts=4)
    assert folder.newest().step == 6  # type: ignore[union-attr]


def test_parts_of_two_meshes_or_runs_are_never_mixed(folder: StateFolder) -> None:
    folder.save(state_of(3), step=3)
    folder.save(state_of(9, 0), step=9, part=0, parts=2)
    folder.save(state_of(9, 1), step=9, part=1, parts=3)
    assert folder.newest().step == 3  # type: ignore[union-attr]
    folder.save(state_of(11, 0), step=11, part=0, parts=2, run="first")
    folder.save(state_of(11, 1), step=11, part=1, parts=2, run="second")
    assert folder.newest().step == 3  # type: ignore[union-attr]
    folder.save(state_of(11, 4), step=11, part=0, parts=2, run="second")
    assert folder.newest().parts == (state_of(11, 4), state_of(11, 1))  # type: ignore[union-attr]


def test_leftovers_older_than_the_newest_whole_step_go_and_others_stay(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, keep=1)
    folder.save(state_of(2, 1), step=2, part=1, parts=2)
    folder.save(state_of(8, 1), step=8, part=1, parts=2)
    old = tmp_path / f".{folder.save(state_of(3), step=3).name}.0011.partial"
    old.write_bytes(b"part")
    new = tmp_path / old.name.replace("000003", "000009")
    new.write_bytes(b"part")
    (tmp_path / "notes.txt").write_text("of the user")
    folder.save(state_of(4), step=4)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [
            new.name,
            "notes.txt",
            *(path.name for path in tmp_path.glob("step-000000000004.*")),
            *(path.name for path in tmp_path.glob("step-000000000008.part-1-of-2.*")),
        ]
    )


def test_a_run_that_went_back_says_so_or_is_refused(folder: StateFolder) -> None:
    for step in (10, 20, 30):
        folder.save(state_of(step), step=step)
    with pytest.raises(UsageError, match=r"step 30.*forget_after\(11\)"):
        folder.save(state_of(11), step=11)
    folder.forget_after(10)
    folder.save(state_of(11), step=11)
    assert folder.newest().step == 11  # type: ignore[union-attr]
    folder.save(state_of(11), step=11)


# ---- damage --------------------------------------------------------------------------------------


def regions_of(path: Path) -> dict[str, int]:
    """Return one offset in each region of a file."""
    size = path.stat().st_size
    head = int.from_bytes(path.read_bytes()[10:14], "little")
    return {
        "magic": 3, "format": 8, "head length": 10, "head length, high": 13, "checksum": 20,
        "head": 46 + head // 2, "head's end": 46 + head - 1, "first entry": 46 + head,
        "middle": (46 + head + size) // 2, "last byte": size - 1,
    }  # fmt: skip


def test_a_flipped_byte_anywhere_is_noticed_and_named(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.save(state_of(1), step=1)
    path = folder.save(state_of(2), step=2)
    whole = path.read_bytes()
    for region, at in regions_of(path).items():
        for bit in (0x01, 0x80):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                saved = folder.newest()
            assert saved is not None
            assert (saved.step, saved.state) == (1, state_of(1)), region
            assert str(path) in caplog.text, region
    path.write_bytes(whole)
    assert folder.newest().step == 2  # type: ignore[union-attr]


def test_a_cut_or_longer_file_is_noticed_and_named(folder: StateFolder) -> None:
    folder.save(state_of(1), step=1)
    path = folder.save(state_of(2), step=2)
    whole = path.read_bytes()
    for at in (*regions_of(path).values(), 0, len(whole) - 1):
        path.write_bytes(whole[:at])
        saved = folder.newest()
        assert saved is not None
        assert saved.step == 1
        assert str(path) in saved.skipped[0]
        assert "cut short" in saved.skipped[0]
    path.write_bytes(whole + b"x")
    assert "too long" in folder.newest().skipped[0]  # type: ignore[union-attr]


def test_a_renamed_file_is_not_taken_for_another_step(folder: StateFolder) -> None:
    path = folder.save(state_of(1), step=1)
    path.rename(folder.path / path.name.replace("000001", "000099"))
    assert folder.newest() is None


def test_damaged_steps_do_not_count_as_kept(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, keep=1)
    folder.save(state_of(1), step=1)
    path = folder.save(state_of(2), step=2)
    path.write_bytes(path.read_bytes()[:-1])
    folder.save(state_of(3, 1), step=3, part=1, parts=2)
    StateFolder(tmp_path, keep=2).save(state_of(3), step=3)
    assert {name[:17] for name in os.listdir(tmp_path)} == {"step-000000000003"}


def test_a_run_that_went_back_over_damage_may_save_again(folder: StateFolder) -> None:
    for step in (1, 2, 3):
        path = folder.save(state_of(step), step=step, run="first")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert folder.newest().step == 2  # type: ignore[union-attr]
    folder.save(state_of(25), step=2, run="second")  # it does not go on with 3, nor would a restart
    folder.save(state_of(3), step=3, run="second")
    assert folder.newest().state == state_of(3)  # type: ignore[union-attr]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 1, "part": 2, "parts": 2}, "part 2 of 2"),
        ({"step": 1, "part": -1, "parts": 2}, "part -1 of 2"),
        ({"step": 1, "state": {"a": "text"}}, "'a' is str"),
        ({"step": 1, "state": {1: b"x"}}, "1 is bytes"),
    ],
)
def test_wrong_arguments_are_named(
    folder: StateFolder, arguments: dict[str, Any], said: str
) -> None:
    state = arguments.pop("state", {"a": b"x"})
    with pytest.raises(UsageError, match=said):
        folder.save(state, **arguments)
    assert os.listdir(folder.path) == []
    with pytest.raises(UsageError, match="keep is 0"):
        StateFolder(folder.path, keep=0)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="a file is in its way"):
            StateFolder(path)


def test_a_folder_that_is_gone_is_told(folder: StateFolder) -> None:
    folder.path.rmdir()
    with pytest.raises(ResourceError, match="can't be read"):
        folder.newest()
    with pytest.raises(ResourceError, match=r"step 1|can't be read"):
        folder.save(state_of(1), step=1)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(folder: StateFolder) -> None:
    folder.path.chmod(0o500)
    with pytest.raises(ResourceError, match="Permission"):
        folder.save(state_of(1), step=1)


def test_a_full_disk_is_told_and_leaves_the_last_state(folder: StateFolder) -> None:
    folder.save(state_of(1), step=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(ResourceError, match="step 2 can't be saved"):
            folder.save(state_of(2), step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert folder.newest().step == 1  # type: ignore[union-attr]
    assert len(os.listdir(folder.path)) == 1


# ---- kills (H23) ---------------------------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SEED = int(os.environ.get("MSD_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
KILLS = [20, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from tests.support.ledger import Corpus

    rng = random.Random(5)
    corpus = Corpus({"one": [[rng.randrange(1, 40) for _ in range(400)]]})
    return {
        "schema": 1,
        "tokenizer": {"vocabulary": corpus.vocabulary},
        "batch": {"rows": 4, "row_tokens": 32},
        "sources": corpus.write_tokens(tmp_path_factory.mktemp("one")),
    }


@pytest.fixture(scope="module")
def oracle(job: dict[str, Any]) -> dict[int, tuple[dict[str, bytes], list[bytes]]]:
    """By step: the state before it and its rows, of one uninterrupted run."""
    import msd_daemon

    found = {}
    with msd_daemon.inline(job) as stream:
        state = stream.state_dict()
        for step in stream:
            found[step.number] = (state, [row.tokens.tobytes() for row in step.rows])
            state = stream.state_dict()
            if step.number == 1500:
                return found
    raise AssertionError


def forked(act: Any) -> int:
    """Run `act` in a forked child; return its pid. It writes files alone."""
    pid = os.fork()
    if pid:
        return pid
    try:
        act()
    finally:
        os._exit(1)


def kill_after(pid: int, delay_s: float) -> None:
    time.sleep(delay_s)  # the moment of the kill is the subject
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def check_continues(job: dict[str, Any], oracle: Any, saved: Any) -> None:
    """Restore the saved state and see that its next step is the uninterrupted run's."""
    import msd_daemon

    for state in saved.parts:
        assert state == oracle[saved.step][0]
    with msd_daemon.inline(job) as stream:
        stream.load_state_dict(saved.state)
        step = next(iter(stream))
    assert step.number == saved.step
    assert [row.tokens.tobytes() for row in step.rows] == oracle[saved.step][1]


@pytest.mark.parametrize("kills", KILLS)
def test_a_saving_process_killed_at_any_moment_goes_on_equal(
    tmp_path: Path, job: dict[str, Any], oracle: Any, kills: int
) -> None:
    print(f"MSD_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    states = {step: state for step, (state, _) in oracle.items()}
    folder, first = StateFolder(tmp_path / "0"), 0
    for number in range(kills):
        told, tell = os.pipe()

        def save_all(folder: StateFolder = folder, first: int = first, tell: int = tell) -> None:
            for step in range(first, len(states)):
                os.write(tell, step.to_bytes(4, "little"))  # the save of `step` begins
                folder.save(states[step], step=step)

        pid = forked(save_all)
        os.close(tell)
        os.read(told, 4)
        kill_after(pid, rng.uniform(0, 0.05))
        begun = first
        while chunk := os.read(told, 4):
            begun = int.from_bytes(chunk, "little")
        os.close(told)
        saved = folder.newest()
        if saved is None:
            assert begun == 0
            continue
        assert saved.step in (begun, begun - 1, first), (saved.step, begun)
        assert saved.skipped == ()
        check_continues(job, oracle, saved)
        first = saved.step
        if first > len(states) - 400:  # what the oracle read ends
            folder, first = StateFolder(tmp_path / str(number)), 0
    folder.save(states[first + 1], step=first + 1)
    leftovers = [name for name in os.listdir(folder.path) if name.endswith(".partial")]
    assert all(int(name[6:18]) >= first for name in leftovers)
    assert len(list(folder.path.glob("step-*"))) <= 3


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_one_of_four_killed_in_a_joint_save_never_gives_a_mix(
    tmp_path: Path, job: dict[str, Any], oracle: Any, kills: int
) -> None:
    print(f"MSD_TEST_SEED={SEED}")
    rng = random.Random(SEED + 1)
    folder = StateFolder(tmp_path)
    step = 0
    for attempt in range(kills):

        def save_part(part: int, step: int, run: str) -> None:
            for number in range(step, step + 40):
                folder.save(oracle[number][0], step=number, part=part, parts=4, run=run)
            os._exit(0)

        pids = [
            forked(lambda part=part, step=step, run=f"a{attempt}": save_part(part, step, run))
            for part in range(4)
        ]
        victim = pids.pop(rng.randrange(4))
        kill_after(victim, rng.uniform(0, 0.02))
        for pid in pids:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        saved = folder.newest()
        if saved is None:
            continue
        assert len(saved.parts) == 4
        assert saved.step >= step - 1
        check_continues(job, oracle, saved)
        step = saved.step
        folder.forget_after(step)
    assert step > 0
