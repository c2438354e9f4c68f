"""Small shards as the example jobs of media and chats expect them, and a tokenizer for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.support.chat_templates import CHATML
from tests.support.media import card, encode, noise, wav
from tests.support.tars import sample

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>",
    "<|vision_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>",
)  # fmt: skip
RECORDS = 12


def write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer without merges: 256 bytes, then SPECIAL."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path))


def write_vlm(data: Path) -> None:
    """Write data for examples/vlm.yaml."""
    captions = b"".join(
        sample(f"{n:04d}", {"jpg": encode(noise(60, 90, n), "JPEG"), "txt": b"waves of colour"})
        for n in range(RECORDS)
    )
    (_folder(data, "captions") / "a.tar").write_bytes(captions + bytes(1024))
    picture = encode(card())
    pages = {
        "texts": [["before", None, "behind"]] * RECORDS,
        "images": [[None, picture, None]] * RECORDS,
    }
    pq.write_table(pa.table(pages), _folder(data, "pages") / "a.parquet")
    lines = "".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(RECORDS))
    text = zstandard.ZstdCompressor().compress(lines.encode())
    (_folder(data, "text") / "a.jsonl.zst").write_bytes(text)


def write_audio(data: Path) -> None:
    """Write data for examples/audio.yaml: sounds of half a second, one of them too short."""
    folder = _folder(data, "speech")
    lines = []
    for n in range(RECORDS):
        seconds = 0.1 if n == 0 else 0.5
        wave = np.sin(np.arange(int(16000 * seconds)) * 0.05 * (n + 1)).astype(np.float32)
        (folder / f"{n}.wav").write_bytes(wav(wave))
        lines.append({"audio_filepath": f"{n}.wav", "duration": seconds, "text": f"tone {n}"})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_sft(data: Path) -> None:
    """Write data for examples/sft.yaml."""
    (data / "chat_template.jinja").write_text(CHATML)
    chats = [
        [
            {"role": "user", "content": f"What is {n} + 2?"},
            {"role": "assistant", "content": f"{n + 2}"},
        ]
        for n in range(200)
    ]
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    (_folder(data, "chats") / "a.jsonl").write_text(lines)
    maths = pa.table({"question": ["1 + 1?"] * RECORDS, "answer": ["2"] * RECORDS})
    pq.write_table(maths, _folder(data, "maths") / "a.parquet")


def _folder(data: Path, name: str) -> Path:
    folder = data / name
    folder.mkdir()
    return folder
