"""Text for the demo: what this machine holds already, or the files of a folder, as sources of a job.

Nothing is fetched. Files that msd reads as they are stay where they are; what must be gathered first
(docstrings, package metadata, manual pages) is written into the demo's own folder, one format each.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msd_client.contract.errors import NotFoundError

SOURCE_BYTES_MAX = 12 << 20
"""Enough that no source of the demo begins its second epoch, and read within a second."""
FILE_BYTES = range(64, 256 << 10)
GROUP_BYTES_MIN = 64 << 10
"""Smaller groups of a --data folder only clutter the mixture, unless it has nothing else."""
GATHER_S = 4.0
"""Longest time for one gathered source: slow disks get less text, not a longer wait."""

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}
)


@dataclass(frozen=True)
class DemoSource:
    """A source of the demo's job."""

    name: str
    what: str
    """For people: what the text is and how it is stored."""
    section: dict[str, Any]
    """Its section of the job file."""
    size_bytes: int
    files: int


@dataclass
class Found:
    """Sources, and what was left out with the reason."""

    sources: list[DemoSource] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def system_sources(folder: Path) -> Found:
    """Gather this machine's own text.

    Args:
        folder: Where gathered files are written.

    Raises:
        NotFoundError: Not even two sources were found.
    """
    found = Found()
    code = _python_files(Path(sysconfig.get_path("stdlib")))
    for source in (
        _in_place("code", "source of the Python library, plain files", code),
        _docstrings(folder, code),
        _packages(folder),
        _manuals(folder),
        _documents(Path("/usr/share")),
    ):
        if source is not None:
            found.sources.append(source)
    if len(found.sources) < 2:
        raise NotFoundError(
            f"found {len(found.sources)} sources of text on this machine, a mixture needs 2 "
            f"(looked at {sysconfig.get_path('stdlib')}, /usr/share/doc, /usr/share/man): give --data DIR"
        )
    return found


def _python_files(root: Path) -> list[Path]:
    return _take(_walk(root, lambda name: name.endswith(".py")), SOURCE_BYTES_MAX)


def _docstrings(folder: Path, files: list[Path]) -> DemoSource | None:
    def texts() -> Iterator[str]:
        for file in files:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # old escapes in other people's source
                    tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue
            for node in ast.walk(tree):
                if isinstance(
                    node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Module)
                ):
                    text = ast.get_docstring(node)
                    if text and len(text) >= 40:
                        yield text

    return _write_jsonl(
        folder, "docstrings", "docstrings of that source", texts(), prefer_zstd=True
    )


def _packages(folder: Path) -> DemoSource | None:
    def texts() -> Iterator[str]:
        for base in _package_folders():
            for info in sorted(base.glob("*-info")):
                for name in ("METADATA", "PKG-INFO"):
                    if text := _read_text(info / name):
                        yield text

    kept = list(_capped(texts(), SOURCE_BYTES_MAX))
    if not kept:
        return None
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return _write_jsonl(folder, "packages", "metadata of installed packages", kept)
    path = folder / "packages.parquet"
    pq.write_table(pa.table({"text": kept}), path, row_group_size=32)
    what = f"metadata of {len(kept)} installed packages, parquet"
    return DemoSource("packages", what, {"paths": str(path)}, _bytes(kept), 1)


def _package_folders() -> list[Path]:
    named = [
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        "/usr/lib/python3/dist-packages",
    ]
    named += [f"{sysconfig.get_path('stdlib')}/site-packages"]
    return [Path(name) for name in dict.fromkeys(named)]


def _manuals(folder: Path) -> DemoSource | None:
    def texts() -> Iterator[str]:
        pages = _walk(Path("/usr/share/man"), lambda name: name.endswith(".gz"))
        for page in pages:
            if page.parent.parent.name != "man":
                continue  # translations of the same pages
            try:
                text = gzip.decompress(page.read_bytes()).decode()
            except (OSError, EOFError, UnicodeDecodeError):
                continue
            if not text.startswith(".so "):
                yield text

    return _write_jsonl(folder, "manuals", "manual pages", texts())


def _documents(share: Path) -> DemoSource | None:
    def is_document(name: str) -> bool:
        lower = name.lower()
        return (
            lower == "copyright"
            or lower.startswith(("readme", "news", "todo", "faq"))
            or (lower.endswith((".txt", ".md", ".rst")))
        )

    candidates = list(_walk(share / "common-licenses", lambda _: True))
    candidates += _walk(share / "doc", lambda name: is_document(name) and not name.endswith(".gz"))
    files = _take(candidates, SOURCE_BYTES_MAX)
    return _in_place(
        "documents",
        "documents and licences of the system, plain files",
        files,
        document="blank_line",
    )


def folder_sources(root: Path, *, sources_max: int = 10) -> Found:
    """Group the files of a folder into sources: by their first folder, format and text field.

    Raises:
        NotFoundError: No such folder, or no text in it; says what was left out.
    """
    if not root.is_dir():
        raise NotFoundError(f"--data {root}: no such folder", path=str(root))
    found = Found()
    groups: dict[tuple[str, str, str], list[Path]] = {}
    skipped: dict[str, int] = {}
    for file in _walk(root, lambda _: True, is_any_size=True, skipped=frozenset({"__pycache__"})):
        key = _group_of(file, root)
        if isinstance(key, str):
            skipped[key] = skipped.get(key, 0) + 1
        else:
            groups.setdefault(key, []).append(file)
    found.notes = [f"left out {count} files: {reason}" for reason, count in sorted(skipped.items())]
    ordered = sorted(groups.items(), key=lambda item: (-_size(item[1]), item[0]))
    tiny = [item for item in ordered[2:] if _size(item[1]) < GROUP_BYTES_MIN]
    if tiny:
        ordered = [item for item in ordered if item not in tiny]
        found.notes.append(
            f"left out {len(tiny)} groups of files under {GROUP_BYTES_MIN >> 10} KiB"
        )
    for key, files in ordered[:sources_max]:
        found.sources.append(_folder_source(key, files, {s.name for s in found.sources}))
    if len(ordered) > sources_max:
        found.notes.append(f"left out the {len(ordered) - sources_max} smallest groups of files")
    if not found.sources:
        raise NotFoundError(
            f"--data {root}: no text found; give a folder with .jsonl (.gz .zst .xz), .parquet or "
            f"text files. {'; '.join(found.notes) or 'It is empty'}",
            path=str(root),
        )
    return found


def _folder_source(key: tuple[str, str, str], files: list[Path], taken: set[str]) -> DemoSource:
    group, kind, text_field = key
    wanted = f"{group}.{kind}" if group else kind
    if len(files) == 1:
        wanted = files[0].name.partition(".")[0]
    name = _free_name(wanted, taken)
    section: dict[str, Any] = {"paths": [str(file) for file in files]}
    if kind.startswith(("jsonl", "parquet")):
        section["text"] = text_field
    else:
        section["format"] = "text"
        if _size(files) / len(files) > 128 << 10:
            section["document"] = "blank_line"
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    what = f"{count} of {kind}" + (f', field "{text_field}"' if text_field else "")
    return DemoSource(name, what, section, _size(files), len(files))


def _group_of(file: Path, root: Path) -> tuple[str, str, str] | str:
    """Return (first folder, kind, text field) of a file, or why it is left out."""
    parts = file.relative_to(root).parts
    group = parts[0] if len(parts) > 1 else ""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    last = suffixes[-1] if suffixes else ""
    compression = {".gz": ".gz", ".zst": ".zst", ".xz": ".xz"}.get(last, "")
    kind = (suffixes[-2] if len(suffixes) > 1 else "") if compression else last
    if file.stat().st_size == 0:
        return "empty"
    if kind in (".parquet", ".pq") and not compression:
        text_field = _parquet_field(file)
        return (group, "parquet", text_field) if text_field else "parquet without a column of text"
    if kind in (".jsonl", ".ndjson"):
        text_field = _json_field(file, compression)
        kind_name = "jsonl" + compression
        return (
            (group, kind_name, text_field) if text_field else "JSON lines without a field of text"
        )
    if compression or not _is_text(file):
        return f"{''.join(suffixes) or 'no extension'} is no text that msd reads"
    return group, kind.lstrip(".") or "text", ""


def _json_field(file: Path, compression: str) -> str | None:
    try:
        with _open_lines(file, compression) as lines:
            record = json.loads(lines.readline(4 << 20))
    except (OSError, EOFError, ValueError, ImportError):
        return None
    return _text_field(record) if isinstance(record, dict) else None


def _open_lines(file: Path, compression: str) -> Any:
    if compression == ".gz":
        return gzip.open(file, "rb")
    if compression == ".xz":
        import lzma

        return lzma.open(file, "rb")
    if compression == ".zst":
        import io

        import zstandard

        return io.BufferedReader(
            zstandard.ZstdDecompressor().stream_reader(file.open("rb"), closefd=True)
        )
    return file.open("rb")


def _parquet_field(file: Path) -> str | None:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        return None
    try:
        with pq.ParquetFile(file) as opened:
            row = next(opened.iter_batches(batch_size=1), None)
    except (OSError, ValueError):  # ArrowInvalid is a ValueError
        return None
    return _text_field(row.to_pylist()[0]) if row is not None and row.num_rows else None


def _text_field(record: dict[str, Any]) -> str | None:
    """Return the usual name of a text field where there is one, else the longest string's."""
    texts = {name: len(value) for name, value in record.items() if isinstance(value, str)}
    for name in ("text", "content", "document", "body"):
        if name in texts:
            return name
    return max(texts, key=lambda name: texts[name], default=None)


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            head = opened.read(64 << 10)
    except OSError:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4 or error.reason != "unexpected end of data":
            return False
    return b"\0" not in head


def _free_name(wanted: str, taken: set[str]) -> str:
    clean = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in wanted)
    base = clean.lstrip(".-")[:56] or "source"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def _in_place(name: str, what: str, files: list[Path], **keys: Any) -> DemoSource | None:
    if not files:
        return None
    section = {"paths": [str(file) for file in files], "format": "text", **keys}
    return DemoSource(name, what, section, _size(files), len(files))


def _write_jsonl(
    folder: Path, name: str, what: str, texts: Iterable[str], *, prefer_zstd: bool = False
) -> DemoSource | None:
    kept = list(_capped(texts, SOURCE_BYTES_MAX))
    if not kept:
        return None
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in kept).encode()
    path, kind = folder / f"{name}.jsonl.gz", "gzip"
    data = b""
    if prefer_zstd:
        try:
            import zstandard
        except ImportError:
            pass
        else:
            path, kind = folder / f"{name}.jsonl.zst", "zstd"
            data = zstandard.ZstdCompressor(level=1).compress(lines)
    path.write_bytes(data or gzip.compress(lines, 1))
    shown = f"{what}, JSON lines in {kind}"
    return DemoSource(name, shown, {"paths": str(path)}, _bytes(kept), 1)


def _capped(texts: Iterable[str], bytes_max: int) -> Iterator[str]:
    """Give texts until their bytes or the time for gathering are used up."""
    used, until = 0, time.monotonic() + GATHER_S
    for text in texts:
        used += len(text)
        if used > bytes_max or time.monotonic() > until:
            return
        yield text


def _walk(
    root: Path,
    is_wanted: Callable[[str], bool],
    *,
    is_any_size: bool = False,
    skipped: frozenset[str] = SKIPPED_FOLDERS,
) -> Iterator[Path]:
    """Give readable regular files below a folder, in the order of their names; no hidden ones."""
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if name.startswith(".") or not is_wanted(name):
                continue
            if is_any_size:
                if path.is_file() and os.access(path, os.R_OK):
                    yield path
            elif path.is_file() and path.stat().st_size in FILE_BYTES and os.access(path, os.R_OK):
                yield path


def _take(files: Iterable[Path], bytes_max: int) -> list[Path]:
    """Return files of valid UTF-8, each content's place once, up to a number of bytes."""
    taken: dict[Path, None] = {}
    used = 0
    for file in files:
        real = Path(os.path.realpath(file))
        if real in taken or _read_text(real) is None:
            continue
        used += real.stat().st_size
        if used > bytes_max:
            break
        taken[real] = None
    return list(taken)


def _read_text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)
