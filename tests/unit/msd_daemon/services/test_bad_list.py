"""The list of bad records in a job's folder, and the file of those that are quarantined."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

import msd_daemon.services.bad_list as bad_list
import msd_daemon.services.quarantine as quarantine
from federation.model.job import (
    BatchRule,
    MixturePoint,
    MixtureSchedule,
    ResolvedJob,
    Shard,
    SourceSpec,
    TokenizerSpec,
)
from msd_client.contract.errors import ErrorBudgetExceededError
from msd_daemon.services.bad_list import BadList
from msd_daemon.services.bad_records import BadRecords, page_of_folder
from msd_daemon.services.job_folder import JobFolder
from msd_daemon.services.quarantine import Quarantine, QuarantineEntry
from msd_daemon.workers.bad_notice import BadNotice, BadRow


def notice(*indices: int, block_key: int = 0, source: int = 0, more: int = 0) -> BadNotice:
    rows = [BadRow(at, 3, "/d/a.jsonl", "byte offset", 10 * at, "", f"bad {at}") for at in indices]
    return BadNotice(source, block_key, rows, {3: more} if more else {}, min(indices, default=0))


def listed(listing: BadList, source: str | None = None) -> list[tuple[str, int, int]]:
    return [(r.source, r.block_key, r.block_index) for r in listing.read(source, 0, 10**6).rows]


def job(*names: str) -> ResolvedJob:
    sources = tuple(
        SourceSpec(name, "jsonl", "none", "seekable", (Shard(f"/{name}", 1, f"f-{name}"),), "")
        for name in names
    )
    mixture = MixtureSchedule("tokens", (MixturePoint(0, dict.fromkeys(names, 1.0)),))
    return ResolvedJob("j", 0, sources, TokenizerSpec("bytes"), BatchRule(4, 64), mixture)


def test_records_stand_in_the_order_of_their_source_once_each(tmp_path: Path) -> None:
    listing = BadList(tmp_path / "x" / "bad.db")
    assert listing.read(None, 0, 10) == ([], 0, {})
    listing.write([("b", notice(5, 2)), ("a", notice(7, block_key=9))], {})
    listing.write([("b", notice(2, 3)), ("a", notice(1, block_key=1 << 48))], {})
    wanted = [("a", 9, 7), ("a", 1 << 48, 1), ("b", 0, 2), ("b", 0, 3), ("b", 0, 5)]
    assert listed(listing) == wanted
    assert listed(listing, "a") == wanted[:2]
    page = listing.read(None, 1, 2)
    assert [(r.source, r.block_index, r.text) for r in page.rows] == [
        ("a", 1, "bad 1"),
        ("b", 2, "bad 2"),
    ]
    assert (page.total, page.forgotten) == (5, {})


def test_the_oldest_make_room_and_stay_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_list, "LISTED_MAX", 3)
    listing = BadList(tmp_path / "bad.db")
    for _ in range(2):  # the second time, as after a restore, nothing changes
        listing.write([("a", notice(0, 1, 2, 3, 4)), ("b", notice(9))], {})
        assert listed(listing) == [("a", 0, 2), ("a", 0, 3), ("a", 0, 4), ("b", 0, 9)]
        assert listing.read(None, 0, 9).forgotten == {"a": 2}
    listing.write([("a", notice(7))], {})
    assert listing.read("a", 0, 9).forgotten == {"a": 3}
    assert listing.read("b", 0, 9).forgotten == {}


def test_records_that_no_notice_names_are_counted_once(tmp_path: Path) -> None:
    listing = BadList(tmp_path / "bad.db")
    for _ in range(2):
        listing.write([("a", notice(1, more=40)), ("a", notice(60, more=2))], {})
    page = listing.read(None, 0, 9)
    assert (page.total, page.forgotten) == (2, {"a": 42})


def begun(state_dir: Path, one: ResolvedJob) -> None:
    """Note in the folder `x` that the job runs."""
    about = {"job": one.name, "digest": one.digest(), "uid": "1000"}
    JobFolder(state_dir, "x").keep_resolved("", about)


def test_a_session_writes_soon_and_says_how_far_the_draw_came(tmp_path: Path) -> None:
    one = job("a", "b")

    begun(tmp_path, one)

    async def run() -> None:
        records = BadRecords(tmp_path / "jobs" / "x", one, 1000)
        records.add(notice(3, 8))
        records.add(notice(1, source=1))
        records.add(notice(1, source=2))  # of no source
        page = await records.page(None, 0, 10)
        assert [r["block_index"] for r in page["records"]] == [3, 8, 1]
        records.add(notice(9))
        records.close([(0, 8), (0, 0)])

    asyncio.run(run())
    page = page_of_folder(tmp_path, "j", 1000, (None, 0, 10))
    assert page is not None
    told = [(r["source"], r["block_index"], r["is_drawn"], r["status"]) for r in page["records"]]
    assert told == [
        ("a", 3, True, "bad_syntax"),
        ("a", 8, False, "bad_syntax"),
        ("a", 9, False, "bad_syntax"),
        ("b", 1, False, "bad_syntax"),
    ]
    assert page["folder"] == str(tmp_path / "jobs" / "x")
    assert page_of_folder(tmp_path, "other", 1000, (None, 0, 10)) is None
    assert page_of_folder(tmp_path, one.digest()[:8], 1000, ("b", 0, 10))["total"] == 1  # type: ignore[index]


def test_a_run_without_a_bad_record_has_an_empty_list(tmp_path: Path) -> None:
    begun(tmp_path, job("a"))
    page = page_of_folder(tmp_path, "j", 1000, (None, 0, 10))
    assert page is not None
    assert (page["records"], page["total"], page["job"]) == ([], 0, "j")
    assert page_of_folder(tmp_path, None, 1000, (None, 0, 10)) is None
    assert not (tmp_path / "jobs" / "x" / "bad.db").exists()


def test_others_do_not_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 5)
    begun(tmp_path, job("a"))

    async def run() -> None:
        records = BadRecords(tmp_path / "jobs" / "x", job("a"), 1000)
        records.add(notice(3))
        records.close(None)

    asyncio.run(run())
    assert page_of_folder(tmp_path, None, 1001, (None, 0, 10)) is None
    assert page_of_folder(tmp_path, None, 1000, (None, 0, 10)) is not None


def test_a_full_disk_costs_the_list_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "jobs").write_text("no folder")

    async def run() -> None:
        records = BadRecords(tmp_path / "jobs" / "x", job("a"), 0)
        records.add(notice(3))
        assert (await records.page(None, 0, 10))["records"] == []
        records.add(notice(4))
        records.close([(0, 0)])

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert caplog.text.count("bad records are only counted") == 1


def entry(
    place: int = 7, *, source: str = "a", epoch: int = 0, **changes: object
) -> QuarantineEntry:
    fields = {"shard": 0, "fingerprint": f"f-{source}", "key": "k", "cause": "crash", "text": "t"}
    return QuarantineEntry(source=source, place=place, epoch=epoch, **fields | changes)  # type: ignore[arg-type]


def opened(path: Path, *names: str) -> Quarantine:
    one = Quarantine(path, job(*names or ("a", "b")))
    asyncio.run(one.load())
    return one


def test_entries_are_there_again_and_the_earliest_epoch_holds(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "x" / "quarantine.jsonl"
    one = opened(path)
    assert one.orders() == []
    for added in (entry(7, epoch=2), entry(9, source="b"), entry(7, epoch=1), entry(7, epoch=3)):
        asyncio.run(one.add(added))
    wanted = [
        {"source": 0, "records": [[0, 7, 1, "t"]], "suspects": [], "losses": []},
        {"source": 1, "records": [[0, 9, 0, "t"]], "suspects": [], "losses": []},
    ]
    assert one.orders() == wanted
    assert opened(path).orders() == wanted
    # A pass of validation reads one of the sources, under another number.
    assert opened(path, "b").orders() == [
        {"source": 0, "records": [[0, 9, 0, "t"]], "suspects": [], "losses": []}
    ]


def test_a_line_that_was_cut_short_costs_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "quarantine.jsonl"
    asyncio.run(opened(path).add(entry(1)))
    path.write_bytes(path.read_bytes() + b'{"source": "a", "sha')
    one = opened(path)
    assert [known.place for known in one.entries] == [1]
    assert "cut short" in caplog.text
    asyncio.run(one.add(entry(2)))
    assert [known.place for known in opened(path).entries] == [1, 2]


def test_an_entry_of_another_file_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    one = opened(path)
    asyncio.run(one.add(entry(1, fingerprint="other")))
    asyncio.run(one.add(entry(2, shard=4)))
    assert one.entries == []


def test_too_many_fail_and_name_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "ENTRIES_MAX", 2)
    one = opened(tmp_path / "quarantine.jsonl")
    for place in (1, 2):
        asyncio.run(one.add(entry(place)))
    asyncio.run(one.add(entry(1, source="b")))
    with pytest.raises(ErrorBudgetExceededError, match=r"source a: 2 of its records .* one: boom"):
        asyncio.run(one.add(entry(3, text="boom")))


def test_suspects_are_told_and_bounded(tmp_path: Path) -> None:
    one = opened(tmp_path / "quarantine.jsonl")
    for number in range(quarantine.SUSPECTS_MAX + 2):
        one.suspect(1, 0, number, number + 5)
    (order,) = one.orders()
    assert (order["source"], order["records"]) == (1, [])
    assert order["suspects"][0] == [0, 2, 7]
    assert len(order["suspects"]) == quarantine.SUSPECTS_MAX
    assert json.loads(json.dumps(order)) == order
