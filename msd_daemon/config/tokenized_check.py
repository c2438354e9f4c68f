"""Checks that pairs of `msdctl tokenize` are of the tokenizer of the job that reads them.

Their manifest tells. Other pairs, and those in a store, hold ids that nothing says the meaning of.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from federation.model.job import SourceSpec, TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_client.contract.plain import encode_plain
from msd_daemon.config.faults import Fault, told_fault
from msd_daemon.config.tokenizer_section import VOCABULARY_UNKNOWN
from msd_daemon.sources.tokenized_manifest import read_manifest
from msd_daemon.stores.urls import is_url

_COMPARED_KEYS = ("kind", "fingerprint", "pattern", "bos_id", "eos_id")
"""What ids depend on; the library's version does not count, it may be another by design."""


def check_tokenized(
    sources: Iterable[SourceSpec], tokenizer: TokenizerSpec, faults: list[Fault]
) -> None:
    """Refuse pairs that another tokenizer made, or with other BOS and EOS.

    Args:
        sources: Of the job; only those of format megatron are looked at.
        tokenizer: The job's. Of one that is a mere vocabulary only the count is compared.
        faults: Receives one fault for each folder of such pairs.
    """
    if tokenizer.vocabulary_count == VOCABULARY_UNKNOWN:
        return
    for source in sources:
        if source.format != "megatron":
            continue
        place = f"sources.{source.name}.paths"
        local = (shard.path for shard in source.shards if not is_url(shard.path))
        for folder in dict.fromkeys(Path(path).parent for path in local):
            try:
                found = read_manifest(folder)
            except ConfigError as error:
                faults.append(told_fault(place, str(folder), error))
                continue
            fault = _difference(found[1]["tokenizer"], tokenizer) if found else None
            if fault is not None:
                faults.append(Fault(place, str(folder), *fault))


def _difference(made: dict[str, Any], tokenizer: TokenizerSpec) -> tuple[str, str] | None:
    """Return what is wrong and its remedy, None where the pairs fit."""
    if tokenizer.kind == "none":
        count = made.get("vocabulary_count")
        if type(count) is not int or count <= tokenizer.vocabulary_count:
            return None
        problem = (
            f"msdctl tokenize made its pairs with a vocabulary of {count}, the job's is "
            f"{tokenizer.vocabulary_count}"
        )
        return problem, f"write tokenizer: {{vocabulary: {count}}}, or name the tokenizer itself"
    own = encode_plain(tokenizer)
    keys = [key for key in _COMPARED_KEYS if made.get(key) != own[key]]
    if not keys:
        return None
    problem = (
        f"msdctl tokenize made its pairs with another tokenizer ({_shown(made, keys)}) than the "
        f"job's ({_shown(own, keys)})"
    )
    remedy = "give the job that tokenizer, with its bos and eos, or make the pairs anew (--rewrite)"
    return problem, remedy


def _shown(tokenizer: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key} {str(tokenizer.get(key))[:80]}" for key in keys)
