"""Resolving a user's transform: what is copied, what the digest says, what is refused."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

import msd_daemon.config.user_code as user_code
from federation.user_copy import read_copy
from msd_client.contract.errors import ConfigError
from msd_daemon.config.transform_file import TransformFile
from msd_daemon.config.user_code import resolve_user_call
from msd_daemon.transforms.user_check import check_user_call
from msd_daemon.transforms.user_process import open_user_call

pytestmark = pytest.mark.processes


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a folder for a job file and the user's code beside it."""
    monkeypatch.setattr(user_code, "_imports", {})
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def resolve(job, **section):
    faults = []
    rule = resolve_user_call(
        "s.transform", TransformFile(**section), job, job.parent / "store", faults
    )
    assert faults == []
    return rule


def fault(job, **section):
    faults = []
    assert resolve_user_call("s.transform", TransformFile(**section), job, job.parent / "store", faults) is None  # fmt: skip
    return faults[0].line()


def result(rule, sample=None):
    with open_user_call(rule, memory_bytes_max=1 << 30, sample_s_max=60) as process:
        return process.call(sample or {}, 1)


def listed(rule):
    return sorted(read_copy(rule).files)


def test_no_section_is_no_call(tmp_path):
    assert resolve_user_call("s.transform", None, tmp_path, tmp_path / "store", []) is None
    assert not (tmp_path / "store").exists()


def test_a_module_beside_the_job_is_copied_alone_and_read_only(job):
    write(job, {"mine.py": "def fn(sample, rng): return {'v': 1}", "other.py": "", "data": "x"})
    rule = resolve(job, call="mine:fn")
    assert rule.python == sys.executable
    assert rule.folder == str(job.parent / "store" / rule.digest)
    assert listed(rule) == ["mine.py"]
    assert result(rule) == [{"v": 1}]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in Path(rule.folder).rglob("*")}
    assert modes == {0o444, 0o555}
    assert os.listdir(job.parent / "store") == [rule.digest]


def test_the_copy_runs_whatever_becomes_of_the_original(job):
    write(job, {"mine.py": "def fn(sample, rng): return {'v': 1}"})
    first = resolve(job, call="mine:fn")
    write(job, {"mine.py": "def fn(sample, rng): return {'v': 2}"})
    second = resolve(job, call="mine:fn")
    assert first.digest != second.digest
    (job / "mine.py").unlink()
    assert (result(first), result(second)) == ([{"v": 1}], [{"v": 2}])


def test_a_package_is_copied_without_what_is_hidden_or_compiled(job):
    write(
        job,
        {
            "pkg/__init__.py": "",
            "pkg/sub/mod.py": "from pkg.sub import words\ndef fn(sample, rng): return {'n': words.N}",
            "pkg/sub/words.py": "N = len(open(__file__.replace('words.py', 'list.txt')).read())",
            "pkg/sub/list.txt": "abc",
        },
    )
    for name in (".git/config", "__pycache__/mod.pyc", "sub/old.pyc"):
        (job / "pkg" / name).parent.mkdir(exist_ok=True)
        (job / "pkg" / name).write_text("x")
    rule = resolve(job, call="pkg.sub.mod:fn")
    assert listed(rule) == ["pkg/__init__.py", "pkg/sub/list.txt", "pkg/sub/mod.py", "pkg/sub/words.py"]  # fmt: skip
    assert result(rule) == [{"n": 3}]


def test_files_keep_their_place_and_their_module_is_found(job):
    source = (
        "import helper\ndef fn(sample, rng): return {'t': open('../words.txt').read() + helper.T}"
    )
    write(job, {"libs/mine.py": source, "libs/helper.py": "T = '!'", "words.txt": "hello"})
    rule = resolve(job, call="mine:fn", files=["libs/*.py", "words.txt"])
    assert listed(rule) == ["libs/helper.py", "libs/mine.py", "words.txt"]
    assert read_copy(rule).paths == ("libs", ".")
    assert result(rule) == [{"t": "hello!"}]
    elsewhere = job.parent / "elsewhere"
    write(elsewhere, {"far.py": "def fn(sample, rng): return {'far': 1}"})
    assert result(resolve(job, call="far:fn", files=["../elsewhere/far.py"])) == [{"far": 1}]


def test_the_digest_is_of_content_call_options_and_versions_alone(job):
    write(job, {"mine.py": "def fn(s, r, a=0): return {'a': a}\ndef other(s, r): pass"})
    digest = resolve(job, call="mine:fn").digest
    assert resolve(job, call="mine:fn").digest == digest
    moved = job.parent / "moved"
    job.rename(moved)
    rule = resolve(moved, call="mine:fn")
    assert rule.digest == digest
    assert len({digest} | {
        resolve(moved, call="mine:other").digest,
        resolve(moved, call="mine:fn", options={"a": 1}).digest,
        resolve(moved, call="mine:fn", files=["mine.py"]).digest,
    }) == 3  # fmt: skip
    versions = read_copy(rule).versions
    assert versions.python == ".".join(map(str, sys.version_info[:3]))
    assert set(versions.packages) == {"numpy"}
    assert result(resolve(moved, call="mine:fn", options={"a": 7})) == [{"a": 7}]


def test_another_version_of_a_package_is_refused_by_name(job):
    write(job, {"mine.py": "def fn(s, r): return s"})
    rule = resolve(job, call="mine:fn")
    copy = read_copy(rule)
    copy.versions.packages["numpy"] = "1.0"
    folder = job.parent / "older"
    Path(rule.folder).rename(folder)
    (folder / "msd-call.json").chmod(0o644)
    (folder / "msd-call.json").write_bytes(copy.text())
    older = type(rule)(rule.call, rule.python, str(folder), copy.digest())
    with pytest.raises(ConfigError, match=r"has numpy .*, the job was resolved with 1.0: restore"):
        result(older)


def test_a_damaged_copy_is_made_again_by_a_submit(job):
    write(job, {"mine.py": "def fn(s, r): return {'v': 1}"})
    rule = resolve(job, call="mine:fn")
    copied = Path(rule.folder, "files", "mine.py")
    copied.chmod(0o644)
    copied.write_text("def fn(s, r): return {'v': 2}")
    with pytest.raises(ConfigError, match="was changed"):
        result(rule)
    assert resolve(job, call="mine:fn") == rule
    assert result(rule) == [{"v": 1}]
    assert os.listdir(job.parent / "store") == [rule.digest]


def test_installed_code_stays_and_code_of_nobody_is_copied(job, tmp_path):
    rule = resolve(job, call="msgpack.fallback:Packer")
    assert listed(rule) == []
    assert "msgpack" in read_copy(rule).versions.packages
    write(tmp_path / "dev", {"shared.py": "T = 'dev'"})
    write(job, {"mine.py": f"import sys\nsys.path.append({str(tmp_path / 'dev')!r})\nimport shared\ndef fn(s, r): return {{'t': shared.T}}"})  # fmt: skip
    rule = resolve(job, call="mine:fn")
    assert listed(rule) == ["mine.py", "shared.py"]
    (tmp_path / "dev" / "shared.py").write_text("T = 'changed'")
    assert result(rule) == [{"t": "dev"}]


@pytest.mark.parametrize(
    ("section", "line"),
    [
        (
            {"call": "mine:fn", "python": "venv/bin/python"},
            's.transform.python: "venv/bin/python": no such program; name an interpreter',
        ),
        (
            {"call": "mine:nothing"},
            's.transform.call: "mine:nothing": module mine (mine.py) has no nothing; mend the module',
        ),
        (
            {"call": "absent:fn"},
            "ModuleNotFoundError: No module named 'absent'; add its file to files, or install it",
        ),
        (
            {"call": "broken:fn"},
            'File "broken.py", line 1, in <module> | 1 / 0 | ~~^~~ | ZeroDivisionError: division by',
        ),
        ({"call": "mine:fn", "files": ["x/*"]}, 's.transform.files[0]: "x/*": no such file; mend'),
        (
            {"call": "mine:fn", "files": ["../a/t.txt", "../b/t.txt"]},
            's.transform.files[1]: "../b/t.txt": ',
        ),
        ({"use": "no-such"}, "s.transform.use: \"no-such\": no installed package has this entry"),
    ],
)  # fmt: skip
def test_faults_name_the_key_and_the_remedy(job, section, line):
    write(job, {"mine.py": "def fn(s, r): return s", "broken.py": "1 / 0"})
    write(job.parent, {"a/t.txt": "", "b/t.txt": ""})
    assert line in fault(job, **section)
    store = job.parent / "store"
    assert not store.exists() or os.listdir(store) == []


def test_an_import_that_does_not_end_is_a_fault(job):
    write(job, {"mine.py": "import threading\nthreading.Event().wait()"})
    faults = []
    section = TransformFile(call="mine:fn")
    resolve_user_call("s.t", section, job, job.parent / "store", faults, start_s_max=1.0)
    assert "cannot be called 1 s after the start" in faults[0].line()


def test_too_much_is_refused(job, monkeypatch):
    monkeypatch.setattr("msd_daemon.config.user_files.FILES_BYTES_MAX", 1000)
    write(job, {"pkg/__init__.py": "def fn(s, r): pass", "pkg/data": "x" * 1000})
    assert "are over 10000 files or 1000 bytes; name the files it needs" in fault(
        job, call="pkg:fn"
    )


def test_sources_that_share_a_transform_import_it_once(job, tmp_path):
    write(
        job, {"mine.py": f"open({str(tmp_path / 'log')!r}, 'a').write('i')\ndef fn(s, r): return s"}
    )
    assert resolve(job, call="mine:fn") == resolve(job, call="mine:fn")
    assert (tmp_path / "log").read_text() == "i"


SAMPLES = [{"n": n} for n in range(20)]


def test_check_passes_code_that_depends_on_record_and_rng_alone(job):
    write(job, {"mine.py": "import random\ndef fn(s, rng): return {**s, 'a': rng.random(3), 'b': random.random()}"})  # fmt: skip
    assert check_user_call(resolve(job, call="mine:fn"), SAMPLES) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\ndef fn(s, rng): return {'v': os.urandom(8)}",
        "import os\ndef fn(s, rng): return {'v': os.getpid()}",
        "import numpy as np\nown = np.random.default_rng(1)\ndef fn(s, rng): return {'v': own.random()}",
        "seen = []\ndef fn(s, rng):\n    seen.append(s)\n    return {'v': len(seen)}",
    ],
)
def test_check_finds_code_that_does_not(job, source):
    write(job, {"mine.py": source})
    lines = check_user_call(resolve(job, call="mine:fn"), SAMPLES)
    assert [line.partition(":")[0] for line in lines] == [f"record {n}" for n in range(8)]
    assert "draw from rng alone and keep nothing between calls" in lines[0]


def test_check_tells_records_that_fail(job):
    write(job, {"mine.py": "def fn(s, rng): return {'v': 1 / (s['n'] - 2)}"})
    (line,) = check_user_call(resolve(job, call="mine:fn"), SAMPLES)
    assert line.startswith("record 2: mine:fn raised: | Traceback (most recent call last):")
    assert line.endswith("ZeroDivisionError: division by zero")
