"""Eight sources of as many formats, made by the test: images, sounds, chats, documents, plain texts.

`media_writers` writes them. Words are numbers and each stands in one place of one record, so what is delivered tells where it
comes from. Records are kept as they were meant; `media_oracle` says what has to come of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.media import encode, noise, tone, wav

PAD, IMAGE, BEGIN, END, AUDIO, EOS, USER, ASSISTANT, TURN_END = range(9)
SPECIAL_WORDS = ("<pad>", "<image>", "<vs>", "<ve>", "<audio>", "<eos>", "<u>", "<a>", "<e>")
FIRST_WORD = 16
ROW_TOKENS = 128
ROW_PATCHES = 96
ROW_FRAMES = 64
BLOCK_RECORDS = 20
STREAM_BLOCK_RECORDS = 12
LINES_BLOCK_BYTES = 2048
TEMPLATE = """{% for m in messages %}{% if m.role == 'assistant' %}<a> {% generation %}{{ m.content }}\
 <e> {% endgeneration %}{% else %}<u> {% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{% if p.type == 'image' %}<image> {% else %}{{ p.text }} {% endif %}\
{% endfor %}{% endif %} <e> {% endif %}{% endfor %}"""


@dataclass(frozen=True)
class Item:
    """An image or a sound."""

    modality: str
    content: bytes | None
    """None: its file is not there."""


@dataclass(frozen=True)
class Turn:
    """A message of a chat: words, and where it shows an image."""

    is_assistant: bool
    parts: tuple[tuple[int, ...] | Item, ...]


Part = tuple[int, ...] | Item | Turn


@dataclass
class Record:
    """What a record holds, in the order in which a model reads it."""

    key: str
    parts: list[Part]
    is_filtered: bool = False
    """True where the source's `where` refuses it."""
    fault: str = ""
    """Why it is no record at all, by the name of a status."""
    size_bytes: int = 0
    """Raw bytes, as record windows count them."""


@dataclass
class MadeSource:
    """A source: its section of the job, its records by shard, what is left out of it."""

    name: str
    section: dict[str, Any]
    shards: list[list[Record]]
    excluded: set[str] = field(default_factory=set)
    is_missing_left_out: bool = False
    kind: str = "tokens"
    """Of its order, as `oracle_order.Source` has it."""
    block_counts: tuple[tuple[int, ...], ...] = ()
    """Records of each block of each shard, where the container itself has blocks."""

    @property
    def records(self) -> list[Record]:
        return [record for shard in self.shards for record in shard]


class Maker:
    """Hands out words, images and sounds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.vocabulary = FIRST_WORD
        self._pictures = 0

    def words(self, most: int, least: int = 1) -> tuple[int, ...]:
        count = self.rng.randint(least, most)
        begin = self.vocabulary
        self.vocabulary += count
        return tuple(range(begin, begin + count))

    def image(self, sides: tuple[int, int] = (16, 72)) -> Item:
        self._pictures += 1
        height, width = (self.rng.randint(*sides) for _ in range(2))
        kind = self.rng.choice(["JPEG", "PNG", "PNG", "WEBP"])
        return Item("image", encode(noise(height, width, self._pictures), kind))

    def sound(self, seconds: float | None = None) -> Item:
        length = seconds or self.rng.uniform(0.05, 0.6)
        return Item("audio", wav(tone(length, self.rng.uniform(100, 900), 8000), 8000))


def text_of(words: tuple[int, ...]) -> str:
    return " ".join(map(str, words))


def write_tokenizer(path: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(SPECIAL_WORDS)}
    words |= {f"<unused{n}>": n for n in range(len(words), FIRST_WORD)}
    words |= {str(number): number for number in range(FIRST_WORD, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


def corpus_job(folder: Path, sources: list[MadeSource], **changes: Any) -> dict[str, Any]:
    """Return a job over sources, with small blocks and windows."""
    batch = {
        "rows": 8, "row_tokens": ROW_TOKENS, "microbatch_rows": 2, "positions": "mrope",
        "microbatch_patches": 2 * ROW_PATCHES, "microbatch_frames": 2 * ROW_FRAMES,
    } | changes.pop("batch", {})  # fmt: skip
    job: dict[str, Any] = {
        "schema": 1,
        "name": "formats",
        "seed": 23,
        "tokenizer": {"file": str(folder / "tokenizer.json"), "eos": EOS},
        "chat": {"template": str(folder / "template.jinja")},
        "image": ["decode", {"resize": "multiple"}, {"patchify": "raster", "patch": 8, "merge": 2}],
        "audio": [
            "decode",
            {"resample": 8000},
            {"mel": {"bins": 16, "hop_ms": 10.0, "dtype": "float16"}},
        ],
        "placeholder": {
            "image": {"token": IMAGE, "begin": BEGIN, "end": END},
            "audio": {"token": AUDIO, "tokens": "ceil(frames / 4)"},
        },
        "batch": batch,
        "defaults": {
            "shuffle": {
                "window_shards": 2, "window_records": 16, "block_records": BLOCK_RECORDS,
                "stream_block_records": STREAM_BLOCK_RECORDS, "interleave": 2,
            },
            "on_error": {"policy": "skip", "budget_ratio": 0.5},
        },
        "sources": {source.name: source.section for source in sources},
        "mixture": {
            "unit": "tokens",
            0: {source.name: 3 if source.name == "pages" else 1 for source in sources},
        },
    }  # fmt: skip
    return job | changes
