"""Tokenizers: `open_tokenizer` in a worker, `describe_tokenizer` at submit."""

from msd_daemon.transforms.describe import describe_tokenizer
from msd_daemon.transforms.tokenizer import Tokenizer, open_tokenizer

__all__ = ["Tokenizer", "describe_tokenizer", "open_tokenizer"]
