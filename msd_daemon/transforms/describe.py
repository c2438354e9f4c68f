"""What a tokenizer file is: found out once at submit and written into the resolved job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.transforms.fingerprint import file_fingerprint, merges_path, tokenizer_files
from msd_daemon.transforms.tiktoken_tokenizer import ENCODINGS, read_ranks, vocabulary_count

Policy = str | int | None
"""`end`, `start`, `none` (or None), an id, or the text of a special token."""

_FOLDER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<EOT>", "<|eot|>")
_BOS_NAMES = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]", "<SOS>")


@dataclass(frozen=True)
class _Vocabulary:
    """Special tokens of a tokenizer by text, and which of them its files call EOS and BOS."""

    count: int
    special: Mapping[str, int]
    eos: int | None
    bos: int | None


def describe_tokenizer(
    path: str | Path | None,
    *,
    kind: Literal["auto", "huggingface", "tiktoken", "bytes", "none"] = "auto",
    eos: Policy = "end",
    bos: Policy = "none",
    pattern: str | None = None,
    vocabulary: int | None = None,
) -> TokenizerSpec:
    """Return the resolved description of a tokenizer.

    Args:
        path: A tokenizer.json, a SentencePiece `.model`, a `*.tiktoken` rank file, a `*vocab.json`
            with its `*merges.txt` beside it, CLIP's `*.txt.gz`, or a folder with one of the names
            that Hugging Face uses; None for kinds `bytes` and `none`.
        kind: `auto` goes by the file.
        eos: Where the end-of-sequence token stands (`end`, `start`, `none`), or which token it is:
            an id or a special token's text, put at the end.
        bos: Likewise for the begin-of-sequence token, put at the start.
        pattern: tiktoken only: name of the split pattern, where the file does not tell.
        vocabulary: Ids of a pre-tokenized job (kind `none`).

    Raises:
        ConfigError: File, policy, token or id is unknown.
    """
    if kind in {"bytes", "none"} or path is None:
        return _describe_plain(kind, path, eos, bos, vocabulary)
    file = _file_of(Path(path))
    found = _kind_of(file) if kind == "auto" else kind
    if found == "tiktoken":
        return _describe_tiktoken(file, eos, bos, pattern)
    if found == "sentencepiece":
        return _describe_sentencepiece(file, eos, bos)
    return _describe_huggingface(found, file, eos, bos)


def _file_of(path: Path) -> Path:
    """Return the file that a path means; of a folder the one that Hugging Face would take."""
    file = path
    if path.is_dir():
        names = [name for name in _FOLDER_NAMES if (path / name).is_file()]
        file = path / (names or _FOLDER_NAMES)[0]
    if not file.is_file():
        raise ConfigError(
            f"tokenizer {file} is not there: give a tokenizer.json, its folder, a .model or a "
            ".tiktoken file",
            path=str(file),
        )
    return file


def _kind_of(file: Path) -> str:
    if file.name.endswith("vocab.json") and merges_path(file).is_file():
        return "bpe_files"
    if file.name.endswith(".txt.gz"):
        return "clip"
    kinds = {".tiktoken": "tiktoken", ".model": "sentencepiece", ".json": "huggingface"}
    if file.suffix not in kinds:
        raise ConfigError(
            f"tokenizer {file} is neither a tokenizer.json nor a .model, .tiktoken or vocabulary file",
            path=str(file),
        )
    return kinds[file.suffix]


def _describe_plain(
    kind: str, path: str | Path | None, eos: Policy, bos: Policy, vocabulary: int | None
) -> TokenizerSpec:
    if path is not None or kind not in {"bytes", "none"}:
        raise ConfigError(f"tokenizer kind {kind!r} with path {path!r}: give one of them")
    if kind == "none":
        count = vocabulary or TokenizerSpec(kind="none").vocabulary_count
        return TokenizerSpec(kind="none", vocabulary_count=count)
    # The bytes take 0 to 255; the special ids come behind them.
    eos_id, bos_id = 256, 256 if eos in {"none", None} else 257
    known = _Vocabulary(256, {}, eos_id, bos_id)
    start, end = _places(known, eos, bos, "bytes")
    highest = max(255, start or 0, end or 0)
    return TokenizerSpec(
        kind="bytes", vocabulary_count=highest + 1, bos_id=start, eos_id=end, library="utf-8"
    )


def _describe_tiktoken(file: Path, eos: Policy, bos: Policy, pattern: str | None) -> TokenizerSpec:
    ranks = _readable_ranks(file)
    name = pattern or _tiktoken_pattern(file, len(ranks))
    encoding = ENCODINGS.get(name)
    if encoding is None:
        raise ConfigError(f"tokenizer pattern {name!r} is none of {', '.join(ENCODINGS)}")
    eos_id = encoding.special["<|endoftext|>"]
    # These vocabularies have one token for both: a document begins where another ended.
    known = _Vocabulary(vocabulary_count(encoding, ranks), encoding.special, eos_id, eos_id)
    start, end = _places(known, eos, bos, str(file))
    return TokenizerSpec(
        kind="tiktoken",
        path=str(file),
        fingerprint=file_fingerprint(file),
        pattern=name,
        vocabulary_count=known.count,
        bos_id=start,
        eos_id=end,
        library=f"tiktoken {version('tiktoken')}",
    )


def _readable_ranks(file: Path) -> dict[bytes, int]:
    try:
        return read_ranks(file)
    except OSError as error:
        raise ConfigError(
            f"tokenizer {file} cannot be read: {error.strerror}", path=str(file)
        ) from error


def _tiktoken_pattern(file: Path, ranks_count: int) -> str:
    if file.stem in ENCODINGS:
        return file.stem
    for name, encoding in ENCODINGS.items():
        if encoding.ranks_count == ranks_count:
            return name
    raise ConfigError(
        f"tokenizer {file} has {ranks_count} ranks and a name that tells no split pattern: "
        f"set the pattern to one of {', '.join(ENCODINGS)}",
        path=str(file),
    )


def _describe_sentencepiece(file: Path, eos: Policy, bos: Policy) -> TokenizerSpec:
    from msd_daemon.transforms.sentencepiece_tokenizer import control_pieces, load_processor

    fingerprint = file_fingerprint(file)
    processor = load_processor(file)
    pieces = control_pieces(processor)
    ends = [processor.eos_id(), processor.bos_id()]  # -1: the model has none
    named = [
        pieces.get(named_token(file, key) or "", own if own >= 0 else None)
        for key, own in zip(("eos_token", "bos_token"), ends, strict=True)
    ]
    known = _Vocabulary(processor.vocab_size(), pieces, *named)
    start, end = _places(known, eos, bos, str(file))
    return TokenizerSpec(
        kind="sentencepiece",
        path=str(file),
        fingerprint=fingerprint,
        vocabulary_count=known.count,
        bos_id=start,
        eos_id=end,
        library=f"sentencepiece {version('sentencepiece')}",
    )


def _describe_huggingface(kind: str, file: Path, eos: Policy, bos: Policy) -> TokenizerSpec:
    from msd_daemon.transforms.huggingface_tokenizer import load_library_tokenizer

    fingerprint = file_fingerprint(*tokenizer_files(kind, file))
    library = load_library_tokenizer(kind, file)  # refuses a bad file
    is_listed = kind != "huggingface"
    known = _listed_vocabulary(library) if is_listed else _huggingface_vocabulary(file)
    start, end = _places(known, eos, bos, str(file))
    return TokenizerSpec(
        kind=kind,  # type: ignore[arg-type]
        path=str(file),
        fingerprint=fingerprint,
        vocabulary_count=known.count,
        bos_id=start,
        eos_id=end,
        library=f"tokenizers {version('tokenizers')}",
    )


def _listed_vocabulary(library: Any) -> _Vocabulary:
    """Return the vocabulary of a list of merges; they have one token for both, or CLIP's two."""
    known = dict(library.get_vocab(with_added_tokens=True))
    eos = _find_token(known, None, known, _EOS_NAMES)
    bos = _find_token(known, None, known, _BOS_NAMES)
    return _Vocabulary(max(known.values()) + 1, known, eos, eos if bos is None else bos)


def _huggingface_vocabulary(file: Path) -> _Vocabulary:
    plain = _read_map(file)
    special = {
        str(token["content"]): int(token["id"])
        for token in plain.get("added_tokens") or []
        if isinstance(token, dict)
    }
    model_vocabulary = (plain.get("model") or {}).get("vocab") or {}
    if isinstance(model_vocabulary, dict):
        highest = max(model_vocabulary.values(), default=-1)
    else:  # Unigram: a list of [piece, score]
        highest = len(model_vocabulary) - 1
    highest = max(highest, *special.values(), -1)
    known = dict(model_vocabulary) if isinstance(model_vocabulary, dict) else {}
    known |= special
    return _Vocabulary(
        highest + 1,
        known,
        _find_token(known, named_token(file, "eos_token"), special, _EOS_NAMES),
        _find_token(known, named_token(file, "bos_token"), special, _BOS_NAMES),
    )


def _find_token(
    known: Mapping[str, int], named: str | None, special: Mapping[str, int], names: tuple[str, ...]
) -> int | None:
    """Return the id of the token that the files name, else of a well-known special one."""
    if named is not None and named in known:
        return known[named]
    return next((special[name] for name in names if name in special), None)


def named_token(file: Path, key: str) -> str | None:
    """Return a token that the files beside a tokenizer.json name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        beside = file.with_name(name)
        if not beside.is_file():
            continue
        token = _read_map(beside).get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _read_map(file: Path) -> dict[str, Any]:
    try:
        plain = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not readable JSON: {error}", path=str(file)) from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{file} holds no JSON object", path=str(file))
    return plain


def _places(
    known: _Vocabulary, eos: Policy, bos: Policy, where: str
) -> tuple[int | None, int | None]:
    """Return the ids that stand at the start and at the end of a document."""
    at: dict[str, int | None] = {"start": None, "end": None}
    policies = (("eos", eos, known.eos, "end"), ("bos", bos, known.bos, "start"))
    for name, policy, default, natural in policies:
        if policy is None or policy == "none":
            continue
        if isinstance(policy, str) and policy in at:
            place, token = policy, default
        else:
            place, token = natural, _explicit(known, name, policy, where)
        if token is None:
            raise ConfigError(
                f"tokenizer {where} names no {name} token: set {name} to an id or a token's text"
            )
        if at[place] is not None:
            raise ConfigError(f"eos {eos!r} and bos {bos!r} both claim the {place} of a document")
        at[place] = token
    return at["start"], at["end"]


def _explicit(known: _Vocabulary, name: str, policy: str | int, where: str) -> int:
    if isinstance(policy, bool) or (isinstance(policy, int) and not 0 <= policy < 1 << 31):
        raise ConfigError(f"{name} {policy!r} is no token id")
    if isinstance(policy, int):
        if where != "bytes" and policy >= known.count:
            raise ConfigError(f"{name} id {policy} is beyond the {known.count} ids of {where}")
        return policy
    if policy not in known.special:
        have = ", ".join(sorted(known.special, key=known.special.__getitem__)[-8:])
        raise ConfigError(
            f"{name} {policy!r} is neither end, start, none nor a token of {where} (it has {have})"
        )
    return known.special[policy]
