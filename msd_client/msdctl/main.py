"""Entry point of `msdctl`: finds verbs, turns errors into messages and exit codes.

Importable without click, so that a trainer's bare install gets a clear answer instead of a
traceback. Verbs are modules that are imported when they are called.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from msd_client.contract.errors import InternalError, MsdError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `msdctl` and end the process with a documented exit code."""
    raise SystemExit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run one `msdctl` command line; return its exit code instead of leaving.

    0 done, 1 failed, 2 usage, 3 no daemon, 4 not found, 5 deadline, 6 permission, 78 config,
    70 a fault of msd itself.
    """
    try:
        import click
    except ImportError:
        _say(
            "msdctl needs click, which the trainer's install leaves out: pip install 'msd[daemon]'"
        )
        return EXIT_FAILED
    from msd_client.msdctl.verbs import VerbGroup

    group = VerbGroup(name="msdctl", help="Look at and steer msd, the data loader of this node.")
    group = click.version_option(package_name="msd", prog_name="msdctl")(group)
    try:
        result = group.main(args=arguments, prog_name="msdctl", standalone_mode=False)
    except click.ClickException as error:
        error.show(file=sys.stderr)
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except MsdError as error:
        _say(error.message)
        for note in getattr(error, "__notes__", ()):
            _say(str(note))
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away (`| head`): nothing to tell it
        return EXIT_FAILED
    except Exception:  # noqa: BLE001 - the root of a program: anything unforeseen is our fault
        _say(traceback.format_exc())
        _say("msdctl: internal fault; please report the lines above")
        return InternalError.exit_code
    return result if isinstance(result, int) else 0


def _say(message: str) -> None:
    sys.stderr.write(message.rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
