"""Resolves the tokenizer of a job: opens its file once for vocabulary and ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import MsdError
from msd_daemon.config.faults import MISSING, Fault
from msd_daemon.config.job_file import TokenizerFile
from msd_daemon.transforms import describe_tokenizer

Kind = Literal["auto", "huggingface", "tiktoken", "bytes", "none"]

VOCABULARY_UNKNOWN = (1 << 31) - 1
"""Of tokenized sources whose job names no tokenizer: any id of int32 may come."""


def resolve_tokenizer(
    tokenizer: TokenizerFile | None, base_dir: Path, faults: list[Fault], *, is_needed: bool
) -> TokenizerSpec | None:
    """Return the tokenizer of a job.

    Args:
        tokenizer: The section.
        base_dir: Folder that a relative path starts from.
        faults: Receives what is wrong; the result is None then.
        is_needed: False where every source is tokenized already.
    """
    if tokenizer is None:
        if is_needed:
            faults.append(
                Fault(
                    "tokenizer",
                    MISSING,
                    "is needed, there are sources of text",
                    "give tokenizer: {file: tokenizer.json}, a .model or .tiktoken file, or {bytes: true}",
                )
            )
            return None
        return describe_tokenizer(
            None, kind="none", eos="none", bos="none", vocabulary=VOCABULARY_UNKNOWN
        )
    kind, key, path = _place(tokenizer, base_dir)
    try:
        return describe_tokenizer(
            path,
            kind=kind,
            eos=tokenizer.eos,
            bos=tokenizer.bos,
            pattern=tokenizer.pattern,
            vocabulary=tokenizer.vocabulary,
        )
    except MsdError as error:
        faults.append(_fault(tokenizer, key, error.message))
    except OSError as error:
        faults.append(
            Fault(f"tokenizer.{key}", str(path), f"can't be read: {error.strerror}", "mend it")
        )
    return None


def _place(tokenizer: TokenizerFile, base_dir: Path) -> tuple[Kind, str, Path | None]:
    for key in ("file", "dir", "tiktoken"):
        name = getattr(tokenizer, key)
        if name is not None:
            kind: Kind = "tiktoken" if key == "tiktoken" else "auto"
            return kind, key, Path(os.path.join(base_dir, os.path.expanduser(name)))
    return ("bytes", "bytes", None) if tokenizer.bytes else ("none", "vocabulary", None)


def _fault(tokenizer: TokenizerFile, key: str, message: str) -> Fault:
    """Return the fault at the key that the message speaks of."""
    for policy in ("eos", "bos"):
        is_first_word = message.startswith(f"{policy} ")
        if is_first_word or f"names no {policy} token" in message:
            key = policy
            break
    else:
        if "pattern" in message:
            key = "pattern"
    problem, separator, remedy = message.rpartition(": ")
    if not separator:
        problem, remedy = message, "mend or replace it"
    return Fault(f"tokenizer.{key}", getattr(tokenizer, key), problem, remedy)
