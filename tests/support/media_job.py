"""A job of text, chats, images, sounds and videos, on files that it makes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.chat_templates import CHATML
from tests.support.media import encode, noise, tone, video, wav

CHAT = [
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "a ship"},
]


def write_media(folder: Path) -> None:
    """Write shards of every modality, their media beside them, and a chat template."""
    for number in range(6):
        pixels = noise(48 + 16 * number, 64, number)
        (folder / f"{number}.png").write_bytes(encode(pixels))
    (folder / "a.wav").write_bytes(wav(tone(1.0)))
    (folder / "v.mp4").write_bytes(video([20 * n for n in range(12)], [n * 250 for n in range(12)]))
    (folder / "template.jinja").write_text(CHATML)
    lines: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": f"plain text {n} " * 3} for n in range(40)],
        "chat": [{"messages": CHAT} for _ in range(40)],
        "pictures": [{"text": f"picture {n}", "image": f"{n % 6}.png"} for n in range(40)],
        "sounds": [{"text": f"sound {n}", "audio": "a.wav"} for n in range(40)],
        "videos": [{"text": f"video {n}", "video": "v.mp4"} for n in range(40)],
    }
    for name, records in lines.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)


def media_job(*names: str, patches: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a job over some of the sources: text, chat, pictures, sounds, videos."""
    sources: dict[str, Any] = {
        "text": "text.jsonl",
        "chat": {"paths": "chat.jsonl", "messages": "messages"},
        "pictures": {"paths": "pictures.jsonl", "image": "image"},
        "sounds": {"paths": "sounds.jsonl", "audio": "audio"},
        "videos": {"paths": "videos.jsonl", "video": "video"},
    }
    patches = patches or {"patchify": "raster"}
    steps: dict[str, Any] = {
        "chat": ("chat", {"template": "template.jinja"}),
        "pictures": ("image", ["decode", {"resize": "none"}, patches]),
        "sounds": ("audio", [{"resample": 16000}, {"mel": {"bins": 40}}]),
        "videos": ("video", ["decode", {"sample": "fps", "fps": 2.0}, {"resize": "none"}, patches]),
    }
    placeholders = {
        "image": 250,
        "video": 251,
        "audio": {"token": 252, "tokens": "ceil(frames / 8)"},
    }
    given = {steps[name][0]: steps[name][1] for name in names if name in steps}
    media = [key for key in given if key in placeholders]
    return {
        "seed": 7,
        "tokenizer": {"bytes": True, "eos": "end"},
        "sources": {name: sources[name] for name in names},
        "batch": {
            "rows": 4,
            "row_tokens": 512,
            "microbatch_rows": 2,
            "microbatch_patches": 2048,
            "microbatch_frames": 2048,
        },
        **given,
        **({"placeholder": {key: placeholders[key] for key in media}} if media else {}),
    }
