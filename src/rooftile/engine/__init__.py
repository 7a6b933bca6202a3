"""Inference: the caches of keys and values."""

from rooftile.engine.cache import KVCache, PagedKVCache, PagedSequence

__all__ = ["KVCache", "PagedKVCache", "PagedSequence"]
