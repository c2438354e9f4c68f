"""Byte-pair encodings that lie as lists of merges: GPT-2 pairs and CLIP's vocabulary.

Built with Hugging Face's library from the files as they are published; no tokenizer.json is needed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from msd_client.contract.errors import ConfigError
from msd_daemon.transforms.fingerprint import merges_path

CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"
_CLIP_MERGES = 49_152 - 256 - 2
"""The published file holds more; the model was trained with the first so many."""
_CLIP_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_FILE_BYTES_MAX = 256 << 20

Merges = list[tuple[str, str]]


def build_pair(vocabulary: Path) -> Any:
    """Return the library's tokenizer of a GPT-2 pair, `*vocab.json` and `*merges.txt` beside it.

    Raises:
        ConfigError: A file is not there or not what its name says.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    ids = _read_vocabulary(vocabulary)
    merges = merges_path(vocabulary)
    lines = _read(merges).decode("utf-8", "strict").splitlines()
    try:
        tokenizer = Tokenizer(BPE(vocab=ids, merges=_merges(lines, merges)))
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"tokenizer {vocabulary} and {merges.name} do not fit: {error}", path=str(vocabulary)
        ) from error
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    _add_decoder_and_special(tokenizer, [name for name in (CLIP_END,) if name in ids])
    return tokenizer


def build_clip(path: Path) -> Any:
    """Return the library's tokenizer of CLIP's `bpe_simple_vocab_16e6.txt.gz`, 49,408 ids.

    Text is brought to NFC, spaces are joined, letters lowered, as the library's CLIP tokenizers do.
    OpenAI's code mends mojibake (ftfy) and HTML entities before; that is the data's matter here.

    Raises:
        ConfigError: The file is not there or not that list.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.normalizers import NFC, Lowercase, Replace
    from tokenizers.normalizers import Sequence as Normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Split
    from tokenizers.pre_tokenizers import Sequence as Splitters

    lines = _gunzip(path).decode("utf-8", "strict").split("\n")
    merges = _merges(lines[: _CLIP_MERGES + 1], path)
    if len(merges) != _CLIP_MERGES:
        raise ConfigError(
            f"tokenizer {path} has {len(merges)} merges, CLIP's has at least {_CLIP_MERGES}",
            path=str(path),
        )
    letters = _byte_letters()
    pieces = [*letters, *(letter + "</w>" for letter in letters)]
    pieces += ["".join(pair) for pair in merges]
    ids = {piece: number for number, piece in enumerate([*pieces, CLIP_START, CLIP_END])}
    tokenizer = Tokenizer(
        BPE(vocab=ids, merges=merges, end_of_word_suffix="</w>", unk_token=CLIP_END)
    )
    tokenizer.normalizer = Normalizers([NFC(), Replace(Regex(r"\s+"), " "), Lowercase()])
    tokenizer.pre_tokenizer = Splitters(
        [Split(Regex(_CLIP_SPLIT), "removed", invert=True), ByteLevel(add_prefix_space=False)]
    )
    _add_decoder_and_special(tokenizer, [CLIP_START, CLIP_END])
    return tokenizer


def _add_decoder_and_special(tokenizer: Any, names: list[str]) -> None:
    from tokenizers import AddedToken
    from tokenizers.decoders import ByteLevel

    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])


def _byte_letters() -> list[str]:
    """Return a letter for each byte in the order of GPT-2's vocabularies: printable ones first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(others))]


def _merges(lines: list[str], path: Path) -> Merges:
    merges: Merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and "#version" in line):
            continue
        parts = line.split()
        if len(parts) != 2:
            raise ConfigError(
                f"tokenizer {path} line {number} is no pair of pieces: not a list of merges",
                path=str(path),
            )
        merges.append((parts[0], parts[1]))
    return merges


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        ids = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"tokenizer {path} is not readable JSON: {error}", path=str(path)
        ) from error
    is_map = isinstance(ids, dict) and bool(ids)
    if not is_map or any(type(item) is not int or not 0 <= item < 1 << 30 for item in ids.values()):
        raise ConfigError(f"tokenizer {path} is no map of pieces to ids", path=str(path))
    return ids  # type: ignore[no-any-return]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path} cannot be read: {error.strerror}", path=str(path)
        ) from error
    return _bounded(content, path)


def _gunzip(path: Path) -> bytes:
    try:
        with gzip.open(path, "rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"tokenizer {path} cannot be read: {error}", path=str(path)) from error
    return _bounded(content, path)


def _bounded(content: bytes, path: Path) -> bytes:
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(
            f"tokenizer {path} has more than {_FILE_BYTES_MAX} bytes: not a vocabulary",
            path=str(path),
        )
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"tokenizer {path} is not UTF-8: {error}", path=str(path)) from error
    return content
