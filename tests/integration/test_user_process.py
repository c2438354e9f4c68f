"""A user's transform in its own process: what goes in, what comes out, what is refused."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from federation.model.recipe import UserCall
from msd_client.contract.errors import ConfigError, TransformError
from msd_daemon.sources.record import MediaPath
from msd_daemon.transforms.user_process import open_user_call
from tests.support.user_code import user_call

pytestmark = pytest.mark.processes

SAME = "def fn(sample, rng): return sample"


@pytest.fixture
def opened(tmp_path):
    """Open calls that are closed at the test's end."""
    processes = []

    def open_one(source, name="fn", **limits):
        options = limits.pop("options", {})
        rule = user_call(tmp_path / str(len(processes)), source, name, **options)
        limits = {"memory_bytes_max": 1 << 30, "sample_s_max": 60} | limits
        processes.append(open_user_call(rule, **limits))
        return processes[-1]

    yield open_one
    for process in processes:
        process.close()


def test_a_sample_comes_back_as_it_went(opened):
    sample = {
        "text": "Grüße, \U0001f600 \ud800 \x00 世界",
        "größe": 2**80,
        "small": -(2**63),
        "half": 0.5,
        "none": None,
        "flags": [True, False],
        "bytes": bytes(range(256)),
        "ids": list(range(-5, 5)),
        "reals": [0.1, -0.0, float("inf"), 1e-300],
        "mixed": [1, 2.0, "3", None, [], {}],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "image": MediaPath("a/ü.jpg"),
    }
    (given,) = opened(SAME).call(sample, 1)
    assert given == sample
    assert [type(value) for value in given.values()] == [type(v) for v in sample.values()]
    assert np.signbit(given["reals"][1])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
        np.array([1.5, -2], ">f4"),
        np.zeros((0, 3), np.int16),
        np.array(7, np.int64),
        np.arange(20)[::3],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_keep_values_dtype_and_shape(opened, array):
    (given,) = opened(SAME).call({"a": array}, 1)
    assert given["a"].dtype == array.dtype.newbyteorder("=")
    assert given["a"].shape == array.shape
    assert np.array_equal(given["a"], array)


def test_one_record_becomes_none_one_or_several(opened):
    process = opened("""
        def fn(sample, rng):
            count = sample["count"]
            return None if count < 0 else {"n": 1} if count == 1 else [{"n": n} for n in range(count)]
    """)
    assert process.call({"count": -1}, 1) == []
    assert process.call({"count": 0}, 1) == []
    assert process.call({"count": 1}, 1) == [{"n": 1}]
    assert process.call({"count": 3}, 1) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert process.starts == 1


def test_the_key_alone_decides_what_is_drawn(opened):
    source = """
        import random
        import numpy as np
        def fn(sample, rng):
            return {"rng": rng.random(), "random": random.random(), "legacy": np.random.rand()}
    """
    process = opened(source)
    drawn = [process.call({}, key)[0] for key in (5, 2**128 - 1, 5)]
    assert drawn[0] == drawn[2] == opened(source).call({}, 5)[0]
    assert all(drawn[0][name] != drawn[1][name] for name in drawn[0])
    assert drawn[0]["rng"] == np.random.Generator(np.random.Philox(key=5)).random()
    with pytest.raises(ValueError, match="rng_key -1"):
        process.call({}, -1)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed here")
def test_a_call_that_imports_torch_draws_what_it_draws_later(opened):
    process = opened("""
        calls = []
        def fn(sample, rng):
            import torch
            calls.append(1)
            return {"drawn": torch.rand(3), "calls": len(calls)}
    """)
    first, other, again = (process.call({}, key)[0] for key in (7, 8, 7))
    assert first["drawn"].dtype == np.float32
    assert first["drawn"].tolist() == again["drawn"].tolist() != other["drawn"].tolist()
    assert [first["calls"], other["calls"], again["calls"]] == [2, 3, 4]  # the first is made again


def test_hashes_and_threads_do_not_depend_on_the_shell(opened, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    source = """
        import os, sys
        def fn(sample, rng):
            return {"hash": hash("x"), "path": "/somewhere" in sys.path, "omp": os.environ["OMP_NUM_THREADS"]}
    """
    (one,), (other,) = opened(source).call({}, 1), opened(source).call({}, 1)
    assert one == other == {"hash": one["hash"], "path": False, "omp": "1"}


def test_what_is_printed_does_not_reach_the_answer_and_is_kept_for_errors(opened):
    process = opened("""
        import os, sys
        print("at import")
        def fn(sample, rng):
            print("x" * 300_000)
            os.write(1, b"\\xff\\x00garbage\\n")
            os.system("echo from a shell")
            if sample["end"]:
                print("the last word", flush=True)
                os._exit(9)
            return sample
    """)
    assert process.call({"end": False}, 1) == [{"end": False}]
    with pytest.raises(TransformError) as raised:
        process.call({"end": True}, 1)
    assert "ended its process with exit code 9" in raised.value.message
    assert raised.value.message.endswith("  | from a shell\n  | the last word")
    assert len(raised.value.message) < 10_000


def test_large_samples(opened):
    process = opened("def fn(sample, rng): return [sample, {'size': len(sample['raw'])}]")
    raw = np.random.Generator(np.random.Philox(key=1)).bytes(8 << 20)
    pixels = np.frombuffer(raw, np.uint8).reshape(2048, -1)
    given, size = process.call({"raw": raw, "pixels": pixels, "text": "ü" * (4 << 20)}, 1)
    assert given["raw"] == raw
    assert np.array_equal(given["pixels"], pixels)
    assert given["text"] == "ü" * (4 << 20)
    assert size == {"size": 8 << 20}


def test_an_exception_is_its_records_fault_and_shows_its_last_lines(opened):
    process = opened("""
        def inner(sample):
            raise ValueError(f"no {sample['text']}")
        def fn(sample, rng):
            return inner(sample) if sample["text"] else sample
    """)
    with pytest.raises(TransformError) as raised:
        process.call({"text": "grün"}, 1)
    error = raised.value
    assert error.message.startswith("mine:fn raised:\n  | Traceback (most recent call last):\n")
    assert error.message.endswith("  | ValueError: no grün")
    assert 'mine.py", line 3, in inner' in error.message
    assert "user_server" not in error.message
    assert (error.attributes["cause"], error.is_quarantine, error.is_timeout) == (
        "raised",
        False,
        False,
    )
    assert process.call({"text": ""}, 1) == [{"text": ""}]
    assert process.starts == 1


@pytest.mark.parametrize(
    "statement", ["raise SystemExit(3)", "raise KeyboardInterrupt", "fn(s, r)"]
)
def test_whatever_is_raised_ends_the_call_and_not_the_process(opened, statement):
    process = opened(f"def fn(s, r):\n    if s: {statement}\n    return s")
    with pytest.raises(TransformError) as raised:
        process.call({"a": 1}, 1)
    assert raised.value.attributes["cause"] == "raised"
    assert (process.call({}, 1), process.starts) == ([{}], 1)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("7", "gave what is no sample: int, not a dict, a list of dicts or None"),
        ("[{}, 'x']", "a list with str at [1], not a dict"),
        ("{'a': {1: 2}}", "a key of type int, write text at [0]['a']"),
        ("{'a': [0, {'b': {1, 2}}]}", "set (a set has no order, give a list) at [0]['a'][1]['b']"),
        ("{'a': object()}", "builtins.object at [0]['a']"),
        ("{'a': np.array(['2026'], 'M8[s]')}", "an array of datetime64[s] at [0]['a']"),
        ("{'a': 1 << 40000}", "an integer of 5001 bytes at [0]['a']"),
        ("loop", "nested deeper than 64"),
    ],
)
def test_what_is_no_sample_is_refused_by_place(opened, result, told):
    process = opened(f"""
        import numpy as np
        loop = {{}}
        loop["again"] = loop
        def fn(sample, rng): return {result}
    """)
    with pytest.raises(TransformError) as raised:
        process.call({}, 1)
    assert told in raised.value.message
    assert raised.value.attributes["cause"] == "refused"


def test_a_record_that_cannot_be_given_is_refused_by_place(opened):
    with pytest.raises(TransformError, match=r"it holds builtins.object at \['a'\]"):
        opened(SAME).call({"a": object()}, 1)


def test_what_turns_into_plain_values_is_taken(opened):
    process = opened("""
        import collections, numpy as np
        class Tensor:
            def __array__(self, dtype=None, copy=None): return np.ones(2, np.float32)
        def fn(sample, rng):
            return collections.OrderedDict(
                t=Tensor(), f=np.float32(0.5), i=np.int8(3), b=np.bool_(True), s=np.str_("x"),
                names=np.array(["a", "b"]), pair=(1, "x"), raw=bytearray(b"r"))
    """)
    (given,) = process.call({}, 1)
    assert given.pop("t").tolist() == [1, 1]
    assert given == {"f": 0.5, "i": 3, "b": True, "s": "x", "names": ["a", "b"], "pair": [1, "x"], "raw": b"r"}  # fmt: skip
    assert given["b"] is True


def test_arrays_of_the_record_can_be_changed_in_place(opened):
    process = opened("def fn(sample, rng):\n    sample['a'] += 1\n    return sample")
    assert process.call({"a": np.zeros(3, np.float32)}, 1)[0]["a"].tolist() == [1, 1, 1]


def test_options_are_keyword_arguments(opened):
    source = "def fn(sample, rng, rate, words=()): return {'rate': rate, 'words': words}"
    process = opened(source, options={"rate": 0.5, "words": ["a"]})
    assert process.call({}, 1) == [{"rate": 0.5, "words": ["a"]}]


def test_pixels_and_waves(opened):
    process = opened("""
        import numpy as np
        def fn(array, rng):
            return array[:, ::-1] if array.dtype == np.uint8 else array * np.float64(0.5)
    """)
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    turned = process.call_array(pixels, 1)
    assert turned.dtype == np.uint8
    assert np.array_equal(turned, pixels[:, ::-1])
    wave = process.call_array(np.array([1, -1], np.float32), 1)
    assert (wave.dtype, wave.tolist()) == (np.float32, [0.5, -0.5])


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("array / 255", "gave float64 [2, 4, 3] for uint8 [2, 4, 3]"),
        ("array[..., :1]", "gave uint8 [2, 4, 1] for uint8 [2, 4, 3]"),
        ("array[:0]", "gave uint8 [0, 4, 3] for uint8 [2, 4, 3]"),
        ("array[0]", "gave uint8 [4, 3] for uint8 [2, 4, 3]"),
        ("None", "gave what is no sample: NoneType, not an array"),
    ],
)
def test_an_array_step_gives_an_array_of_the_same_kind(opened, result, told):
    process = opened(f"def fn(array, rng): return {result}")
    with pytest.raises(TransformError) as raised:
        process.call_array(np.zeros((2, 4, 3), np.uint8), 1)
    assert told in raised.value.message


def test_a_module_without_a_copy_is_imported_as_the_interpreter_finds_it():
    rule = UserCall("copy:copy", sys.executable, "", "")
    with (
        open_user_call(rule, memory_bytes_max=0, sample_s_max=60) as process,
        pytest.raises(TransformError, match="takes 1 positional argument but 2 were given"),
    ):
        process.call({}, 1)


@pytest.mark.parametrize(
    ("source", "name", "told"),
    [
        ("import nothing_here", "fn", "ModuleNotFoundError: No module named 'nothing_here'"),
        ("def fm(s, r): pass", "fn", "has no fn"),
        ("fn = 3", "fn", "is of type int, not a function"),
        ("import sys\nsys.exit(4)", "fn", "SystemExit: 4"),
        ("import os\nos._exit(4)", "fn", "ends with exit code 4 before it can be called"),
    ],
)
def test_a_function_that_cannot_be_called_is_a_fault_of_the_job(opened, source, name, told):
    process = opened(source, name)
    with pytest.raises(ConfigError) as raised:
        process.call({}, 1)
    assert told in raised.value.message
    assert process.starts == (3 if "before it can" in told else 1)


def test_a_module_that_never_finishes_its_import_is_told_with_its_place(opened):
    source = "import threading\nthreading.Event().wait()"
    process = opened(source, start_s_max=1.0)
    with pytest.raises(ConfigError) as raised:
        process.call({}, 1)
    assert "cannot be called 1 s after the start" in raised.value.message
    assert 'mine.py", line 2 in <module>' in raised.value.message


def test_an_interpreter_that_is_none_or_lacks_numpy_is_told(tmp_path):
    rule = user_call(tmp_path / "a", SAME, python=str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"cannot be run in .*: name an interpreter"):
        open_user_call(rule, memory_bytes_max=0, sample_s_max=60).call({}, 1)
    bare = tmp_path / "bare" / "python"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    rule = user_call(tmp_path / "b", SAME, python=str(bare))
    with pytest.raises(ConfigError, match="numpy is needed and cannot be imported"):
        open_user_call(rule, memory_bytes_max=0, sample_s_max=60).call({}, 1)


def test_a_copy_that_was_changed_is_refused(tmp_path):
    rule = user_call(tmp_path, SAME)
    (tmp_path / "files" / "mine.py").write_text("def fn(sample, rng): return None")
    with pytest.raises(ConfigError, match=r"was changed \(mine.py\): submit the job again"):
        open_user_call(rule, memory_bytes_max=0, sample_s_max=60).call({}, 1)


def test_no_descriptor_is_left(opened):
    before = sorted(os.listdir("/proc/self/fd"))
    process = opened(SAME)
    process.call({}, 1)
    process.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
