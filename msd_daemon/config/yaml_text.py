"""Reads the YAML text of a job into plain maps, refusing what YAML lets pass silently.

Refused: duplicate keys, keys that YAML reads as booleans or dates (a source named `no`), text over
1 MiB, and aliases that unfold into more than 100,000 values.

Numbers are read as YAML 1.2 and JSON write them: `1e-5` is a string in PyYAML's YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from msd_daemon.config.faults import Fault

TEXT_BYTES_MAX = 1 << 20
VALUES_MAX = 100_000
DEPTH_MAX = 32


class YamlFaultError(ValueError):
    """The text is not one plain YAML map; carries the faults found."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(fault.line() for fault in faults))
        self.faults = faults


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that notes duplicate keys instead of taking the last one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.faults: list[Fault] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node.value, str):
                continue
            place = f"line {key_node.start_mark.line + 1}"
            if key_node.value in seen:
                self.faults.append(
                    Fault(place, key_node.value, "the key stands twice in one map", "remove one")
                )
            if key_node.tag not in _KEY_TAGS:
                self.faults.append(
                    Fault(
                        place,
                        key_node.value,
                        f"YAML reads this key as {key_node.tag.rpartition(':')[2]}, not as a name",
                        "put it in quotes",
                    )
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        is_key = index is None and isinstance(parent, yaml.MappingNode)
        if is_key and node is not None and node.tag == _NUMBER_TAG:
            node.tag = "tag:yaml.org,2002:str"
        return node

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """Return a number of YAML 1.2 or JSON; float takes JSON's NaN and Infinity as they are."""
        return float(self.construct_scalar(node))


_NUMBER_TAG = "tag:msd,2026:number"
"""Of plain scalars that YAML 1.1 takes for strings, but for keys."""
_NUMBER = re.compile(
    r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+|[-+]\.[0-9]+|NaN|-?Infinity)\Z"
)
_StrictLoader.add_implicit_resolver(_NUMBER_TAG, _NUMBER, list("-+.0123456789NI"))
_StrictLoader.add_constructor(_NUMBER_TAG, _StrictLoader.construct_number)

_KEY_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:int"}


def read_yaml(text: str) -> dict[str, Any]:
    """Return the map that a YAML text holds, keys as strings.

    Raises:
        YamlFaultError: Not one map, duplicate keys, too large, or not YAML (with line and column).
    """
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_BYTES_MAX:
        raise YamlFaultError(
            [
                Fault(
                    "(file)",
                    f"{len(text)} characters",
                    "larger than 1 MiB",
                    "shorten it, use globs",
                )
            ]
        )
    loader: _StrictLoader | None = None
    try:
        loader = _StrictLoader(text)
        data = loader.get_single_data()
    except yaml.YAMLError as error:
        raise YamlFaultError([_syntax_fault(error)]) from error
    except (RecursionError, ValueError, OverflowError) as error:
        raise YamlFaultError(
            [Fault("(file)", type(error).__name__, "can't be read as YAML", "write plain values")]
        ) from error
    finally:
        if loader is not None:
            loader.dispose()
    if loader.faults:
        raise YamlFaultError(loader.faults)
    return plain_map(data)


def plain_map(data: object) -> dict[str, Any]:
    """Return a job given as a map with all keys as strings, bounded in size and depth.

    Raises:
        YamlFaultError: Not a map, or larger than the limits.
    """
    if not isinstance(data, dict):
        raise YamlFaultError(
            [
                Fault(
                    "(file)",
                    data,
                    "a job is a map of keys",
                    "write `batch: ...` and `sources: ...`",
                )
            ]
        )
    budget = [VALUES_MAX]
    plain = _plain(data, budget, 0)
    assert isinstance(plain, dict)
    return plain


def _plain(value: object, budget: list[int], depth: int) -> object:
    budget[0] -= 1
    if budget[0] < 0 or depth > DEPTH_MAX:
        raise YamlFaultError(
            [
                Fault(
                    "(file)",
                    f"over {VALUES_MAX} values or {DEPTH_MAX} levels",
                    "too large once aliases are unfolded",
                    "write fewer values, use globs",
                )
            ]
        )
    if isinstance(value, dict):
        return {str(key): _plain(item, budget, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, budget, depth + 1) for item in value]
    return value


def _syntax_fault(error: yaml.YAMLError) -> Fault:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1} column {mark.column + 1}" if mark is not None else "(file)"
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return Fault(place, "YAML", str(problem), "mend the YAML there")
