"""The documentation's pages, cut into what a test can look at: fenced blocks, links, headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.sources import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks of all pages in one of the languages; "" is without a language."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            indent, language, body = match.groups()
            if language in languages:
                body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
                found.append(Block(page.name, line, language, body))
    return found


def commands(program: str) -> list[tuple[Block, str]]:
    """Return the command lines of a program in blocks of shells, without prompts and comments."""
    found = []
    for block in blocks("", "bash", "sh", "console"):
        text = block.text.replace("\\\n", " ")
        for raw in text.splitlines():
            line = re.split(r"(?:^|\s)#", raw.strip().removeprefix("$ "))[0].strip()
            for part in re.split(r"\s(?:&&|\|\||;|\|)\s", line):
                part = re.sub(r"^(sudo |srun |[A-Z_]+=\S+ )+", "", part.strip())
                part = re.sub(r"^\S*/(?=msd)", "", part)
                if part.startswith(f"{program} "):
                    found.append((block, part))
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        found.add(kept.strip().replace(" ", "-"))
    return found
