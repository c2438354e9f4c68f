"""The demo's figures and words, from made messages."""

from __future__ import annotations

import io

import pytest

from msd_client.contract.errors import ResourceError
from msd_client.msdctl import demo, main
from msd_client.msdctl.demo_progress import Progress
from msd_client.msdctl.demo_report import mixture_line, report_text, step_line
from msd_client.msdctl.demo_view import LineView, done_bar, panel, ring_text, sparkline

MIB = 1 << 20
STATUS = {
    "daemon": {
        "memory": {"pss_anon": 10 * MIB},
        "cpu_s": 1.0,
        "processes": [{"memory": {"pss_anon": 5 * MIB}, "cpu_s": 0.5}],
    },
    "jobs": [
        {
            "workers": [{"memory": {"pss_anon": MIB, "pss_shmem": 16 * MIB}, "cpu_s": 2.0}],
            "rings": [{"ready": 3, "slots": 4}, {"ready": 4, "slots": 4}],
        }
    ],
}


def step(
    number: int,
    rank: int,
    *,
    wait_s: float = 0.001,
    drawn: tuple[int, int] = (60, 40),
    wanted=(0.6, 0.4),
):
    message = {
        "kind": "step", "rank": rank, "step": number, "step_s": 0.2, "wait_s": wait_s,
        "compute_s": 0.1, "tp_s": 0.05, "dp_s": 0.03, "optimizer_s": 0.01,
    }  # fmt: skip
    if rank == 0:
        message |= {
            "loss": 5.0 - 0.05 * number, "valid_tokens": 1000, "fill": 0.99, "imbalance": 1.01,
            "drawn_tokens": list(drawn), "wanted_shares": list(wanted),
        }  # fmt: skip
    return message


@pytest.fixture
def progress():
    progress = Progress(("code", "web"), 40, 2)
    progress.take({"kind": "joined", "rank": 0, "parameters": 1234})
    progress.take_status(STATUS)
    progress.change_step = 20
    for number in range(40):
        changed = number >= 20
        for rank in (1, 0):
            wait_s = 0.1 if number < 10 else 0.001 * (rank + 1)
            drawn, wanted = ((10, 90), (0.1, 0.9)) if changed else ((60, 40), (0.6, 0.4))
            progress.take(step(number, rank, wait_s=wait_s, drawn=drawn, wanted=wanted))
    return progress


def report_of(progress, **changes):
    return progress.figures() | {"total_s": 61.2, "left_behind": [], "faults": []} | changes


def test_a_step_is_complete_once_all_ranks_told_it():
    progress = Progress(("code", "web"), 3, 2)
    assert progress.take(step(0, 1)) is False
    assert progress.last is None
    assert progress.take(step(0, 0)) is True
    assert progress.last.number == 0


def test_waits_of_the_warm_up_are_left_out(progress):
    figures = progress.figures()
    assert figures["warm_up_steps"] == 10
    assert figures["wait_pct"] == pytest.approx(100 * 0.0015 / 0.2)
    assert figures["wait_pct_slowest_rank"] == pytest.approx(100 * 0.002 / 0.2)
    assert figures["tokens_per_s"] == pytest.approx(5000)


def test_shares_before_and_after_the_change(progress):
    figures = progress.figures()
    assert figures["mixture_before"]["realised"] == {"code": 0.6, "web": 0.4}
    assert figures["mixture_after"]["realised"] == {"code": 0.1, "web": 0.9}
    assert figures["mixture_after"]["first_step"] == 20
    assert figures["mixture_after"]["last_step"] == 39


def test_memory_and_cpu_are_those_of_all_loader_side_processes(progress):
    figures = progress.figures()
    assert figures["memory_anonymous_bytes"] == 16 * MIB
    assert figures["memory_shared_bytes"] == 16 * MIB
    assert figures["loader_cpu_s"] == 3.5
    assert figures["loader_processes"] == 3


def test_report_of_a_good_run(progress):
    text = report_text(report_of(progress))
    assert "loss        4.925 at the start, 3.125 at the end" in text
    assert "0.75 % of step time after 10 warm-up steps (below 2 %" in text
    assert "new weights held from step 20 on" in text
    assert "steps 0-19: wanted" in text
    assert "90.00%" in text
    assert "1,234 parameters" in text
    assert "Left behind: no process" in text
    assert "succeeded in 61 s" in text


def test_report_says_what_went_wrong(progress):
    left = ["process 7 (msd-loader)"]
    text = report_text(report_of(progress, left_behind=left, faults=["something was left behind"]))
    assert "LEFT BEHIND: process 7 (msd-loader)" in text
    assert "FAILED after 61 s: something was left behind" in text


def test_report_of_an_interrupted_run(progress):
    assert "interrupted after 61 s" in report_text(report_of(progress, faults=["interrupted"]))


def test_report_without_any_step():
    progress = Progress((), 10, 4)
    text = report_text(report_of(progress, faults=["rank 0 ended with status 1"]))
    assert "no step was completed" in text
    assert "rank 0 ended with status 1" in text


def test_report_of_a_wait_that_is_too_long():
    progress = Progress(("code", "web"), 1, 1)
    progress.take(step(0, 0, wait_s=0.1))
    text = report_text(report_of(progress))
    assert "NOT below 2 %" in text
    assert "it was not changed" in text


def test_lines_every_twenty_steps(progress):
    out = io.StringIO()
    view, shown = LineView(out), Progress(("code", "web"), 40, 1)
    for number in range(40):
        shown.take(step(number, 0))
        view.stepped(shown)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/40", "20/40", "40/40"]


def test_a_line_tells_rings_memory_and_shares(progress):
    line = step_line(progress)
    assert "rings 3/4 4/4" in line
    assert "32.0 MiB" in line
    assert mixture_line(progress) == "mixture, realised/wanted %: code 10.0/10.0, web 90.0/90.0"


def test_the_panel_draws(progress):
    rich_console = pytest.importorskip("rich.console")
    console = rich_console.Console(file=io.StringIO(), width=100)
    console.print(panel(progress))
    text = console.file.getvalue()
    for part in ("40 of 40", "data wait", "3 of 4 ready", "since step 20", "90.0 %"):
        assert part in text


def test_small_pictures():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(n) for n in range(1000)])) <= 40
    assert ring_text([(1, 3)]) == "0: ■□□ 1 of 3 ready"
    assert done_bar(1, 2, width=4) == "━━┄┄"


def test_weights_fall_in_the_order_of_sources():
    sources = [demo.DemoSource(name, "", {}, 1, 1) for name in "abc"]
    assert demo._weights(sources) == {"a": 3.0, "b": 2.0, "c": 1.0}


@pytest.mark.parametrize(
    ("missing", "remedy"), [("torch", "make demo"), ("uvloop", "msd\\[daemon\\]")]
)
def test_a_missing_library_is_told_before_anything_starts(monkeypatch, missing, remedy):
    find = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name == missing else find("json")
    )
    with pytest.raises(ResourceError, match=remedy):
        demo.check_libraries()


def test_the_folder_leaves_room_for_socket_names(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(demo.tempfile, "gettempdir", lambda: str(deep))
    folder = demo._make_folder()
    try:
        assert len(str(folder)) + demo.SOCKET_NAME_BYTES <= demo.SOCKET_PATH_BYTES_MAX
    finally:
        folder.rmdir()


def test_a_folder_without_text_ends_before_anything_starts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "check_libraries", lambda: None)
    monkeypatch.setattr(demo.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    assert main.run(["demo", "--data", str(tmp_path / "no")]) == 4
    captured = capsys.readouterr()
    assert "no such folder" in captured.err
    assert "Report" not in captured.out
    assert list(tmp_path.iterdir()) == []
