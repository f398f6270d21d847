"""A plain Lightning module and data set, to try the strategy on.

Nothing here knows of pipelines: the same files train under ``strategy="auto"``.
"""

from pipeswift_lightning.examples.gpt import GPT, GPTModule
from pipeswift_lightning.examples.text import TextDataModule

__all__ = ["GPT", "GPTModule", "TextDataModule"]
