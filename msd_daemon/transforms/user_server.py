"""Calls a user's function for a worker: the second process of user_child.py, which loads this file.

Needs the standard library and numpy, Python 3.10 or later. Frames on the link: length of the body
(u64), kind (one byte, see `Kind`), body. The request holds `link` (descriptor), `call`, `paths` (put
first on sys.path), `options` (keyword arguments), `packages` (whose versions are told) and
`data_bytes_max` (0: no limit).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

HEAD = struct.Struct("=QB")
KEY_BYTES = 16
TRACE_LINES_MAX = 12
TRACE_CHARACTERS_MAX = 3000
PYTHON_MIN = (3, 10)
STACK_SIGNAL = signal.SIGUSR2
"""Makes the call's process write where it is to stderr, even where it is stuck in C."""
AT_START = frozenset(sys.modules)


class Kind:
    """Kinds of frames."""

    HELLO = 1
    """JSON {pid}: from the call's process, before the user's code."""
    READY = 2
    """JSON {python, implementation, packages}: the function can be called."""
    FAILED = 3
    """JSON {text}: it cannot, ever."""
    SAMPLE = 4
    """Asks: 16 bytes of the key, then a sample. Answered by DONE with a list of samples."""
    ARRAY = 5
    """Asks: the same with an array. Answered by DONE with one."""
    DESCRIBE = 6
    """Asks for the modules that are loaded; answered by DONE with JSON."""
    DONE = 7
    RAISED = 8
    """JSON {cause, text}."""
    AGAIN = 9
    """Ask once more: the call has loaded torch, whose generator was not seeded for it."""
    VALUES = 10
    """Asks: the key, then a list of arguments; no rng. Answered by DONE with what it returns."""


class UnreadyError(Exception):
    """The function cannot be called; says why."""


class UnfitError(Exception):
    """What the function gave is no sample, or no array."""


def serve(request: dict[str, Any], load_frames: Callable[[], Any]) -> None:
    """Import the function, then answer until the worker goes."""
    link = socket.socket(fileno=request["link"])
    link.setblocking(True)
    os.set_inheritable(link.fileno(), False)
    os.dup2(2, 1)  # what user code prints is kept beside its errors
    with contextlib.suppress(AttributeError, ValueError, OSError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(2, all_threads=False)
    faulthandler.register(STACK_SIGNAL, 2, all_threads=False)
    _send(link, Kind.HELLO, _json({"pid": os.getpid()}))
    try:
        server = _open(request, load_frames)
    except UnreadyError as error:
        _send(link, Kind.FAILED, _json({"text": str(error)}))
        return
    _send(link, Kind.READY, _json(server.versions()))
    while True:
        kind, body = _receive(link)
        _send(link, *server.answer(kind, body))
        del body  # a large sample is not kept until the next


def _open(request: dict[str, Any], load_frames: Callable[[], Any]) -> Server:
    if sys.version_info[:2] < PYTHON_MIN:
        raise UnreadyError(f"Python {_version()} is too old: name one of 3.10 or later")
    try:
        frames = load_frames()
    except ImportError as error:
        raise UnreadyError(
            f"numpy is needed and cannot be imported ({error}): "
            f"{sys.executable} -m pip install numpy"
        ) from error
    if request["data_bytes_max"]:
        limit = request["data_bytes_max"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.path[:0] = request["paths"]
    return Server(request, frames)


class Server:
    """Holds the user's function and calls it."""

    def __init__(self, request: dict[str, Any], frames: Any) -> None:
        self._request = request
        self._frames = frames
        self._options: dict[str, Any] = request["options"]
        self._function = _import(request["call"])

    def versions(self) -> dict[str, Any]:
        """Return the versions of the interpreter and of the packages that were asked for."""
        from importlib import metadata

        packages = {}
        for name in self._request["packages"]:
            with contextlib.suppress(metadata.PackageNotFoundError):
                packages[name] = metadata.version(name)
        implementation = sys.implementation.name
        return {"python": _version(), "implementation": implementation, "packages": packages}

    def answer(self, kind: int, body: bytearray) -> tuple[int, bytes]:
        """Return the answer to a frame."""
        if kind == Kind.DESCRIBE:
            return Kind.DONE, _json(describe_modules(self._request["paths"]))
        had_torch = "torch" in sys.modules
        try:
            answer = Kind.DONE, self._call(kind, body)
        except MemoryError as error:
            answer = Kind.RAISED, _json(_told("memory", error))
        except (UnfitError, self._frames.FrameError) as error:
            told = {"cause": "refused", "text": f"gave what is no sample: {error}"}
            answer = Kind.RAISED, _json(told)
        except BaseException as error:  # noqa: BLE001 - sys.exit() of a transform is its record's fault
            answer = Kind.RAISED, _json(_told("raised", error))
        if not had_torch and "torch" in sys.modules:
            return Kind.AGAIN, b""
        return answer

    def _call(self, kind: int, body: bytearray) -> bytes:
        import numpy as np

        key = int.from_bytes(body[:KEY_BYTES], "little")
        given = self._frames.decode(body, KEY_BYTES)
        seed_all(key)
        if kind == Kind.VALUES:
            answer: bytes = self._frames.encode(self._function(*given, **self._options))
            return answer
        rng = np.random.Generator(np.random.Philox(key=key))
        result = self._function(given, rng, **self._options)
        samples = _array(result) if kind == Kind.ARRAY else _samples(result)
        encoded: bytes = self._frames.encode(samples)
        return encoded


def seed_all(key: int) -> None:
    """Seed the generators that careless code uses, so that a record's result is its own."""
    import numpy as np

    random.seed(key)
    np.random.seed([key >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)])
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.manual_seed(key & (1 << 63) - 1)
        # torch.manual_seed would note a stack trace for a device that is not in use.
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(key & (1 << 63) - 1)


def describe_modules(own_paths: list[str]) -> list[dict[str, Any]]:
    """Return the top-level modules that the user's code has loaded and that are not in `own_paths`.

    Each {name, origin (file or folder), packages (installed distribution to version), is_installed
    (lies in the interpreter's own folders)}; those of Python itself, and what it loads at its start
    for its own ends, are left out.
    """
    import site
    import sysconfig
    from importlib import metadata

    names = {"purelib", "platlib"}
    installed = [sysconfig.get_paths()[name] for name in names] + site.getsitepackages()
    standard = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")]
    owners = _owners()
    found = []
    for name in sorted({name.partition(".")[0] for name in list(sys.modules)} - AT_START):
        origin = _origin(name)
        if origin is None or _is_below(origin, [*own_paths, os.path.dirname(__file__)]):
            continue
        is_installed = _is_below(origin, installed)
        if not is_installed and (name in sys.stdlib_module_names or _is_below(origin, standard)):
            continue
        packages = {package: metadata.version(package) for package in sorted(owners.get(name, ()))}
        found.append(
            {"name": name, "origin": origin, "packages": packages, "is_installed": is_installed}
        )
    return found


def _owners() -> dict[str, set[str]]:
    """Return the installed distributions of each top-level module.

    As importlib.metadata.packages_distributions, which overlooks most of them before Python 3.11.
    """
    from importlib import metadata

    owners: dict[str, set[str]] = {}
    for distribution in metadata.distributions():
        names = set((distribution.read_text("top_level.txt") or "").split())
        if not names:
            files = [file.parts[0] for file in distribution.files or []]
            names = {name.partition(".")[0] for name in files}
        for name in names:
            owners.setdefault(name, set()).add(distribution.metadata["Name"])
    return owners


def _origin(name: str) -> str | None:
    """Return the file of a module or the folder of a package, None where it has none."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return None
    folders = list(getattr(module, "__path__", []))
    if folders:
        return str(folders[0])
    origin = getattr(module, "__file__", None)
    return origin if isinstance(origin, str) else None


def _is_below(path: str, folders: list[str]) -> bool:
    real = os.path.realpath(path)
    return any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders)


def _import(call: str) -> Callable[..., Any]:
    module_name, _, name = call.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except BaseException as error:
        raise UnreadyError(f"cannot be imported: {_trace(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UnreadyError(f"module {module_name} ({_origin(module_name)}) has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise UnreadyError(f"is of type {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _samples(result: Any) -> list[Any]:
    if result is None:
        return []
    if isinstance(result, Mapping):
        return [result]
    if not isinstance(result, (list, tuple)):
        raise UnfitError(f"{_type_of(result)}, not a dict, a list of dicts or None")
    for index, sample in enumerate(result):
        if not isinstance(sample, Mapping):
            raise UnfitError(f"a list with {_type_of(sample)} at [{index}], not a dict")
    return list(result)


def _array(result: Any) -> Any:
    import numpy as np

    if isinstance(result, np.ndarray):
        return result
    if hasattr(result, "__array__") or hasattr(result, "__array_interface__"):
        return np.asarray(result)
    raise UnfitError(f"{_type_of(result)}, not an array")


def _type_of(value: Any) -> str:
    return type(value).__name__


def _told(cause: str, error: BaseException) -> dict[str, str]:
    try:
        text = _trace(error)
        traceback.clear_frames(error.__traceback__)  # what they hold is large, perhaps
    except MemoryError:
        text = "MemoryError"
    return {"cause": cause, "text": text}


def _trace(error: BaseException) -> str:
    """Return the last lines of a traceback, without the first frames: this file's, the import's."""
    place = error.__traceback__
    while place is not None and _is_machinery(place.tb_frame.f_code.co_filename):
        place = place.tb_next
    text = "".join(traceback.format_exception(type(error), error, place)).strip()
    lines = text.splitlines()[-TRACE_LINES_MAX:]
    return "\n".join(lines)[-TRACE_CHARACTERS_MAX:]


def _is_machinery(file: str) -> bool:
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")


def _version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _send(link: socket.socket, kind: int, body: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):  # what was printed comes before the answer
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
    link.sendall(HEAD.pack(len(body), kind))
    link.sendall(body)


def _receive(link: socket.socket) -> tuple[int, bytearray]:
    size_bytes, kind = HEAD.unpack(_receive_all(link, HEAD.size))
    return kind, _receive_all(link, size_bytes)


def _receive_all(link: socket.socket, size_bytes: int) -> bytearray:
    body = bytearray(size_bytes)
    view = memoryview(body)
    while view:
        count = link.recv_into(view)
        if not count:
            os._exit(0)  # the worker has gone
        view = view[count:]
    return body
