"""The rows that peers' writers are given and msd has to give back; made of numpy alone."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

MDS_COLUMNS = {
    "array": "ndarray",
    "array_dtype": "ndarray:int16",
    "array_shape": "ndarray:float32:2,3",
    "binary": "bytes",
    "float16": "float16",
    "float64": "float64",
    "int": "int",
    "json": "json",
    "pixels": "pil",
    "several": "jpeg_array",
    "str_decimal": "str_decimal",
    "str_float": "str_float",
    "str_int": "str_int",
    "text": "str",
    "uint8": "uint8",
}


def mds_row(n: int) -> dict[str, Any]:
    return {
        "array": np.arange(1, n + 2, dtype=np.int64).reshape(1, -1),
        "array_dtype": np.full((2, 300), n, np.int16),
        "array_shape": np.full((2, 3), n / 4, np.float32),
        "binary": bytes([n]) * n,
        "float16": n / 2,
        "float64": n / 3,
        "int": -n,
        "json": {"x": [n, None, "y"], "é": {"z": True}},
        "pixels": np.full((2, 3, 3), n, np.uint8),
        "several": [b"aa", b"b" * n],
        "str_decimal": Decimal(n) / 7,
        "str_float": n * 1.5,
        "str_int": 10**n,
        "text": f"é{n}" * n,
        "uint8": n,
    }


def litdata_row(n: int) -> dict[str, Any]:
    """Arrays whose names begin with t are tensors."""
    return {
        "text": f"é{n}",
        "whole": n - 150,
        "real": n / 2,
        "binary": bytes([n % 256]) * 5,
        "tensor": np.full((2, n % 3 + 1), n, np.int16),
        "tokens": np.arange(n % 5 + 1, dtype=np.int64),
        "matrix": np.full((n % 4 + 1, 2), n, np.float64),
        "vector": np.arange(n % 3 + 1, dtype=np.uint8),
        "is_even": n % 2 == 0,
        "inside": {"deep": n, "list": [n, "x"]},
    }


def nested_row(n: int) -> dict[str, Any]:
    return {
        "id": n,
        "messages": [{"role": "user", "content": f"q{n}é"}] * (n % 3),
        "tags": ["a", "b"][: n % 3],
    }


def mixed_row(n: int) -> dict[str, Any]:
    """Beside an array, lists and maps are packed by LitData's own rules."""
    return {
        "tensor": np.zeros((2, 2), np.float32),
        "turns": [{"role": "user", "n": n, "f": 0.5, "b": True, "z": None}] * (n % 3),
        "texts": ["a", "é"],
        "numbers": [n, -1],
        "reals": [0.5],
        "truths": [True, False],
        "map": {"x": {"y": [1, 2]}, "t": "u", "k": True, "i": 1 << 40, "r": 2.5},
    }


def dataset_row(n: int) -> dict[str, Any]:
    return {"id": n, "text": f"t{n}é" * (n % 50), "scores": [n / 2] * (n % 3)}
