"""Inference: models that generate text, and the KV caches."""

from rooftile.engine.cache import KVCache, PagedKVCache, PagedSequence
from rooftile.engine.config import ModelConfig
from rooftile.engine.engine import Engine
from rooftile.engine.generation import Completion, StreamChunk

__all__ = ["Completion", "Engine", "KVCache", "ModelConfig", "PagedKVCache", "PagedSequence", "StreamChunk"]
