"""What a rank tells of its waits: how many batches it was given, when it gives one back and when it waits."""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any

import pytest

from msd_client import session as session_module
from msd_client.contract.errors import DeadlineError
from msd_client.contract.local_messages import EVENT, RELEASE, RingEvent
from msd_client.session import Session


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Session, "_greet", lambda *_: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(session_module, "_connect", lambda *_: ours)
    session: Any = Session(None, "trainer")  # type: ignore[arg-type]
    yield session, theirs
    ours.close()
    theirs.close()


def test_a_batch_given_back_says_how_many_were_taken(made: Any) -> None:
    session, daemon = made
    session.taken, session.waited_ns = 5, {3: 70}
    session.release(1, 3, 2)
    assert RingEvent(*EVENT.unpack(daemon.recv(100))) == RingEvent(RELEASE, 1, 3, 2, 5, 70)


def test_a_wait_that_lasts_is_told_with_what_was_taken(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = made
    told: list[Any] = []
    monkeypatch.setattr(session_module, "WAIT_TOLD_S", 0.01)
    monkeypatch.setattr(session, "notify", lambda verb, **fields: told.append((verb, fields)))
    monkeypatch.setattr(session, "_explain", lambda: "nothing")
    session.taken, session.generation = 4, 2
    with pytest.raises(DeadlineError):
        session.wait(lambda: False, 0.2, "a batch")
    assert told == [("waiting", {"generation": 2, "told_after_s": 0.01, "taken": 4})]
    assert (session._pid, session._unsent) == (os.getpid(), deque())
