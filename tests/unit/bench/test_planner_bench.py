"""The planner's bench measures what it says, at a size that takes no time."""

from bench import planner


def test_a_small_mesh_is_measured():
    found = planner.measure(16, 2)
    assert found["ranks"] == 16
    assert 200 < found["samples"] < 340
    assert found["step_ms_p50"] > 0
    assert found["rss_mib"] > 10
    assert {
        "mix",
        "pack",
        "cost",
        "balance",
        "digest",
        "state",
        "encode",
        "slices",
        "compile",
    } == set(found["stages_ms"])
    assert all(ms > 0 for stage, ms in found["stages_ms"].items() if stage != "compile")


def test_growth_is_the_slope_between_the_ends():
    found = [{"ranks": 64, "step_ms_p50": 1.0}, {"ranks": 256, "step_ms_p50": 9.0},
             {"ranks": 4096, "step_ms_p50": 64.0}]  # fmt: skip
    assert abs(planner.exponent(found) - 1.0) < 1e-12
