"""docs/errors.md: the catalogue of typed errors, made from the classes themselves.

`python -m msd_client.contract.error_page docs/errors.md` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from msd_client.contract.errors import MsdError

_HEAD = """# Errors

Every error of msd is one of these classes (`msd_client.errors`), made from them by
`python -m msd_client.contract.error_page docs/errors.md`. A message names the thing that failed, the value seen, the
limit and what to do. `except` a group to catch what is below it; many are a built-in kind of error as well.

- **code** is stable: it travels between daemon and ranks, stands in JSON and logs.
- **retry**: the same call may succeed later without a change; the others need one.
- **exit** is the exit code of `msdctl`, `msd-daemon` and `msd-planner` that end with it.

| who has to act | group |
|---|---|
| the programmer of the training script | `UsageError` |
| whoever writes the job, `daemon.toml` or the mesh | `ConfigError` |
| whoever owns the data | `DataError` |
| the operator of the machine | `ResourceError`, `PermissionDeniedError` |
| nobody yet: it passes, or something is started again | `AvailabilityError` |
| whoever updates one side | `ProtocolError` |
| us: please report it | `InternalError` |

| class | below | code | also a | retry | exit | what happened |
|---|---|---|---|---|---|---|
"""


def error_classes(root: type[MsdError] = MsdError) -> Iterator[type[MsdError]]:
    """Yield the classes below a root, parents first, each group in the order of its codes."""
    for kind in sorted(root.__subclasses__(), key=lambda it: it.code):
        if kind.__module__ == MsdError.__module__:
            yield kind
            yield from error_classes(kind)


def error_page() -> str:
    """Return docs/errors.md."""
    lines = [_HEAD]
    for kind in error_classes():
        parents = [it for it in kind.__bases__ if issubclass(it, MsdError) and it is not MsdError]
        also = [
            it.__name__
            for it in kind.__mro__[1:]
            if it.__module__ == "builtins" and it not in (object, Exception, BaseException)
        ]
        meaning = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        lines.append(
            f"| `{kind.__name__}` | {', '.join(f'`{it.__name__}`' for it in parents)} | `{kind.code}` | "
            f"{', '.join(f'`{it}`' for it in also[:1])} | {'yes' if kind.retryable else ''} | "
            f"{kind.exit_code} | {meaning} |\n"
        )
    return "".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(error_page(), encoding="utf-8")
