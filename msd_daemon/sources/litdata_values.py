"""Samples of LitData chunks: leaves of a tree, packed one behind the other, as fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.litdata_json import nested_value
from msd_daemon.sources.packed_values import (
    ARRAY_AXES_MAX,
    Decode,
    array_of,
    content,
    flat_array,
    listed,
    raw_image,
    scalar,
    text,
    unpack,
)
from msd_daemon.sources.record import RawRecord

_BAD_ENCODING = int(RecordStatus.BAD_ENCODING)
_UNREADABLE = int(RecordStatus.UNREADABLE)

_TENSOR_DTYPES = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128"),
    *("complex128", "float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16"),
    *("int32", "int32", "int64", "int64", "bool", "uint16"),
)
_ARRAY_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16"),
    *("float32", "float64", "complex64", "complex128", "bool"),
)
"""By the number that stands in data_format and headers; pickled and void ones are not read."""
_REFUSED = {"pickle": "pickled", "graph": "a graph that holds pickled parts"}
_FILES = frozenset(
    {"bytes", "jpeg", "image", "video", "audio", "file", "tifffile", "tiff", "nifti", "pdf", "mesh"}
)
_DEPTH_MAX = 32
TOKENS = "tokens"
"""Field of chunks whose samples are arrays of ids and nothing else."""
VALUE = "value"
"""Field of samples that are one other value."""

Build = Callable[[Iterator[Any]], Any]


def truth(data: bytes) -> bool:
    """Return a truth value of one byte."""
    if len(data) != 1:
        raise ValueError(f"{len(data)} bytes, a truth value has 1")
    return data[0] != 0


def tensor(data: bytes) -> npt.NDArray[Any]:
    """Return a tensor: big-endian u32 dtype and axes, u32 of each axis, values."""
    code, axes = unpack(">2I", data, 0)
    return _with_header(data, _TENSOR_DTYPES, code, axes, ">")


def array(data: bytes) -> npt.NDArray[Any]:
    """Return an array: u32 dtype and axes, u32 of each axis, values."""
    code, axes = unpack("<2I", data, 0)
    return _with_header(data, _ARRAY_DTYPES, code, axes, "<")


def _with_header(
    data: bytes, dtypes: tuple[str, ...], code: int, axes: int, order: str
) -> npt.NDArray[Any]:
    if code >= len(dtypes) or axes > ARRAY_AXES_MAX:
        raise ValueError(f"an array of dtype {code} and {axes} axes")
    shape = list(unpack(f"{order}{axes}I", data, 8))
    return _values(data[8 + 4 * axes :], dtypes[code], shape)


def _values(data: bytes, name: str, shape: list[int] | None) -> npt.NDArray[Any]:
    is_brain = name == "bfloat16"
    dtype = np.dtype("<u2" if is_brain else name)
    found = flat_array(dtype)(data) if shape is None else array_of(data, dtype, shape)
    return (found.astype("<u4") << 16).view("<f4") if is_brain else found


_DECODERS: dict[str, Decode] = {
    "str": text,
    "text": text,
    "bool": truth,
    "int": scalar("int64"),
    "float": scalar("float64"),
    "pil": raw_image,
    "jpeg_array": listed(content, 0),
    "tensor": tensor,
    "numpy": array,
    "json": nested_value,
    **dict.fromkeys(_FILES, content),
}


def decoder_of(leaf_format: str) -> Decode:
    """Return the decoder of an entry of `data_format`.

    Raises:
        ConfigError: It is pickled, or unknown.
    """
    name, _, parameter = leaf_format.partition(":")
    if name in _REFUSED:
        raise ConfigError(
            f"data_format {leaf_format!r} is {_REFUSED[name]}, which is not read as it can run "
            "code: leave the field out, or write the data anew as text, bytes or arrays"
        )
    if name in ("no_header_tensor", "no_header_numpy"):
        dtypes = _TENSOR_DTYPES if name == "no_header_tensor" else _ARRAY_DTYPES
        number = int(parameter) if parameter.isdecimal() and len(parameter) < 4 else len(dtypes)
        if number >= len(dtypes):
            raise ConfigError(f"data_format {leaf_format!r} has an unknown dtype")
        return lambda data: _values(data, dtypes[number], None)
    if name not in _DECODERS:
        known = ", ".join(sorted(_DECODERS))
        raise ConfigError(f"data_format {leaf_format!r} is not read; read are {known}")
    return _DECODERS[name]


class ItemReader:
    """Takes samples apart.

    Args:
        leaf_formats: `data_format` of index.json.
        tree: `data_spec` of index.json: which leaf stands where.
        is_tokens: True where a sample is the bytes of one array and nothing else.
        wanted: Names of the fields that are read, None for all.

    Raises:
        ConfigError: Something that is wanted cannot be read.
    """

    def __init__(
        self,
        leaf_formats: list[str],
        tree: str,
        *,
        is_tokens: bool,
        wanted: Iterable[str] | None,
    ) -> None:
        self._is_tokens = is_tokens
        self._head_bytes = 0 if is_tokens else 4 * len(leaf_formats)
        names, self._build = (
            ([TOKENS], _leaf) if is_tokens else _tree(tree, _default_name(leaf_formats))
        )
        if len(names) != len(leaf_formats):
            raise ConfigError(f"data_spec has {len(names)} leaves, data_format {len(leaf_formats)}")
        kept = None if wanted is None else frozenset(wanted)
        self._leaves = [
            (name, leaf_format, decoder_of(leaf_format) if kept is None or name in kept else None)
            for name, leaf_format in zip(names, leaf_formats, strict=True)
        ]
        self._kept = kept
        self._name = names[0] if names and self._build is _leaf else ""

    def record(self, data: bytes, place: int) -> RawRecord:
        """Return the record of a sample's bytes."""
        try:
            sizes = [len(data)] if self._is_tokens else self._sizes(data)
        except ValueError as error:
            return RawRecord(place, b"", _UNREADABLE, str(error))
        values: list[Any] = []
        fields_bytes, at = 0, self._head_bytes
        for (name, leaf_format, decode), size in zip(self._leaves, sizes, strict=True):
            raw, at = data[at : at + size], at + size
            if decode is None:
                values.append(None)
                continue
            try:
                values.append(decode(raw))
            except UnicodeDecodeError as error:
                fault = f"field {name!r} is not UTF-8 at byte {error.start}"
                return RawRecord(place, b"", _BAD_ENCODING, fault)
            except (ValueError, OverflowError) as error:
                fault = f"field {name!r} ({leaf_format}): {error}"
                return RawRecord(place, b"", _UNREADABLE, fault)
            fields_bytes += size
        built = self._build(iter(values))
        fields = built if isinstance(built, dict) and not self._name else {self._name: built}
        if self._kept is not None:
            fields = {name: value for name, value in fields.items() if name in self._kept}
        return RawRecord(place, b"", fields=fields, fields_bytes=fields_bytes)

    def _sizes(self, data: bytes) -> list[int]:
        if len(data) < self._head_bytes:
            raise ValueError(f"a sample of {len(data)} bytes, its sizes take {self._head_bytes}")
        sizes: list[int] = np.frombuffer(data, "<u4", self._head_bytes // 4).tolist()
        if self._head_bytes + sum(sizes) != len(data):
            raise ValueError(
                f"a sample of {len(data)} bytes, its fields take {self._head_bytes + sum(sizes)}"
            )
        return sizes


def _leaf(values: Iterator[Any]) -> Any:
    return next(values)


def _default_name(leaf_formats: list[str]) -> str:
    is_array = len(leaf_formats) == 1 and leaf_formats[0].startswith("no_header_")
    return TOKENS if is_array else VALUE


def _tree(written: str, default_name: str) -> tuple[list[str], Build]:
    """Return the top-level field of each leaf, and what builds a sample of the leaves' values.

    Args:
        written: A pytree spec as torch writes it.
        default_name: Of a sample that is a single leaf.
    """
    try:
        root = json.loads(written)[1]
        names, build = _node(root, default_name, 0)
    except (ValueError, LookupError, TypeError, RecursionError, AttributeError) as error:
        raise ConfigError(f"data_spec {written[:100]!r} is not read ({error})") from error
    if root["type"] is not None and not _is_map(root["type"]):
        inner = build
        return names, lambda values: {str(n): v for n, v in enumerate(inner(values))}
    return names, build


def _is_map(kind: str) -> bool:
    return kind in ("builtins.dict", "collections.OrderedDict", "collections.defaultdict")


def _node(node: dict[str, Any], name: str, depth: int) -> tuple[list[str], Build]:
    """Return the names of the leaves below a node, by the root's key, and what builds it."""
    if depth > _DEPTH_MAX:
        raise ValueError("nested too deeply")
    kind, children = node["type"], node["children_spec"]
    if kind is None:
        return [name], _leaf
    context = json.loads(node["context"]) if isinstance(node["context"], str) else node["context"]
    if kind == "collections.defaultdict":
        context = context["dict_context"]
    if not _is_map(kind) and kind not in ("builtins.list", "builtins.tuple"):
        raise ValueError(f"a node of {kind!r}")
    keys = (
        [str(key) for key in context] if _is_map(kind) else [str(n) for n in range(len(children))]
    )
    parts = [
        _node(child, name if depth else key, depth + 1)
        for key, child in zip(keys, children, strict=True)
    ]
    names = [leaf for leaves, _ in parts for leaf in leaves]
    builds = [build for _, build in parts]
    if _is_map(kind):
        return names, lambda values: {k: b(values) for k, b in zip(keys, builds, strict=True)}
    return names, lambda values: [build(values) for build in builds]
