"""Real text without a download: prose of the Python reference that `help()` shows, and a vocabulary of its words."""

import re
from pydoc_data.topics import topics

import torch

LENGTH = 45_000  # characters, about 9000 words: some tens of training steps read it a few times
PIECE = re.compile(r" ?\w+| ?[^\w\s]|\s")  # a word or a sign with the space before it: joined again, the text itself


def python_reference() -> str:
    """Its first paragraphs of plain sentences, one a line, without markup. Grammars, tables and code are left out."""
    blocks = (block for topic in topics.values() for block in re.split(r"\n\s*\n", topic) if "::=" not in block)
    paragraphs = (" ".join(re.sub(r'["*]', "", block).split()) for block in blocks)
    prose = (text for text in paragraphs if len(text) > 120 and re.fullmatch(r"[A-Z][ -~]*\.", text))
    return "\n".join(dict.fromkeys(prose))[:LENGTH]


class Vocabulary:
    """Ids for the pieces of a text, in order of first appearance."""

    def __init__(self, text: str):
        self.pieces = list(dict.fromkeys(PIECE.findall(text)))
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self.ids[piece] for piece in PIECE.findall(text)])

    def decode(self, ids: torch.Tensor) -> str:
        return "".join(self.pieces[i] for i in ids.tolist())
