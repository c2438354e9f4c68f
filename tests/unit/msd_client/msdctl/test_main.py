"""msdctl's root: exit codes, messages on stderr, verbs imported when called."""

import json
import subprocess
import sys

import click
import pytest

from msd_client.contract import errors
from msd_client.msdctl import main, verbs


@pytest.fixture
def failing_verb(monkeypatch):
    """Return a function that installs a verb raising the given error."""

    def install(error):
        @click.command(name="fails")
        def command():
            raise error

        monkeypatch.setattr(
            verbs.VerbGroup,
            "get_command",
            lambda self, ctx, name: command if name == "fails" else None,
        )
        monkeypatch.setattr(verbs.VerbGroup, "list_commands", lambda self, ctx: ["fails"])

    return install


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ResourceError("full"), 1),
        (errors.UsageError("wrong"), 2),
        (errors.DaemonUnavailableError("gone"), 3),
        (errors.NotFoundError("none"), 4),
        (errors.DeadlineError("late"), 5),
        (errors.PermissionDeniedError("no"), 6),
        (errors.JobError("bad"), 78),
        (errors.InternalError("bug"), 70),
        (ZeroDivisionError("bug"), 70),
        (click.UsageError("wrong"), 2),
        (click.Abort(), 130),
    ],
)
def test_exit_code_of_each_error_group(failing_verb, capsys, error, code):
    failing_verb(error)
    assert main.run(["fails"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    if not isinstance(error, click.Abort):
        assert str(getattr(error, "message", error)) in captured.err


def test_unknown_verb_names_the_known_ones(capsys):
    assert main.run(["nothing"]) == 2
    assert "doctor" in capsys.readouterr().err


def test_help_lists_verbs(capsys):
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in verbs.BUILT_IN:
        assert verb in out


def test_without_click_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "click", None)
    assert main.run(["doctor"]) == 1
    assert "msd[daemon]" in capsys.readouterr().err


def test_every_built_in_verb_is_a_command_with_help():
    group = verbs.VerbGroup(name="msdctl")
    context = click.Context(group)
    for verb in verbs.BUILT_IN:
        command = group.get_command(context, verb)
        assert command.name == verb
        assert command.get_short_help_str()


def test_client_side_verbs_import_nothing_of_the_daemon():
    code = (
        "import sys, importlib\n"
        "from msd_client.msdctl.verbs import BUILT_IN\n"
        "for module in BUILT_IN.values(): importlib.import_module(module)\n"
        "heavy = {'msd_daemon', 'federation', 'pydantic', 'torch', 'numpy', 'rich', 'zmq'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_verb_with_a_missing_library_names_it_and_the_remedy(monkeypatch, capsys):
    monkeypatch.setitem(verbs.BUILT_IN, "check", "msd_client.msdctl.not_there")
    assert main.run(["check", "job.yaml", "--mesh", "dp=2"]) == 1
    err = capsys.readouterr().err
    assert "msd_client.msdctl.not_there" in err
    assert "msd[daemon]" in err
    assert main.run(["--help"]) == 0
    assert "not available" in capsys.readouterr().out
