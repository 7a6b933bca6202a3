"""How a model is split over ranks: which rows and columns of its weights each of them has.

    q, k, v; gate, up      rows: each rank has some heads, and some columns of the activation between gate and down
    o, down                columns, so that a rank multiplies what it has; the products are summed over the ranks
    embedding, lm_head     rows: a part of the vocabulary

Where there are fewer KV heads than ranks, several ranks have the same one. Norms are on every rank. The biases of o and
down are on rank 0 alone, because their sum is taken.

Source: Megatron-LM (Shoeybi et al. 2019), section 3.
"""

from __future__ import annotations

import dataclasses

from rooftile.engine.checkpoint import Share
from rooftile.engine.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Split:
    """One of several ranks."""

    rank: int = 0
    ranks: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError where the model can't be split over so many ranks."""
        n, at = self.ranks, f"Engine: tensor_parallel is {self.ranks}, and {config.source}"
        if n == 1:
            return
        sizes = {
            "num_attention_heads": config.heads,
            "intermediate_size": config.intermediate,
            "vocab_size": config.vocab,
        }
        for name, size in sizes.items():
            if size % n:
                raise ValueError(f"{at} has {name} {size}, expected a multiple of {n}")
        if config.kv_heads % n and n % config.kv_heads:
            raise ValueError(f"{at} has num_key_value_heads {config.kv_heads}, expected a multiple or a divisor of {n}")
        if config.whole_qk_norm:
            raise ValueError(
                f"{at} is a model of {config.family}, whose norms of q and k are over all heads, expected 1"
            )

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model as this rank computes it, with its own heads and columns. The vocabulary stays whole."""
        if self.ranks == 1:
            return config
        n = self.ranks
        return dataclasses.replace(
            config,
            heads=config.heads // n,
            kv_heads=max(1, config.kv_heads // n),
            intermediate=config.intermediate // n,
        )

    def equal(self, n: int) -> Share:
        """This rank's part of a dimension that is split equally."""
        size = n // self.ranks
        return Share(n, ((self.rank * size, (self.rank + 1) * size),))

    def kv(self, config: ModelConfig) -> Share:
        """This rank's rows of k, and of v."""
        size = max(1, config.kv_heads // self.ranks) * config.head_dim
        copies = max(1, self.ranks // config.kv_heads)  # ranks that have the same head
        first = self.rank // copies * size
        return Share(config.kv_heads * config.head_dim, ((first, first + size),))


WHOLE = Split()
