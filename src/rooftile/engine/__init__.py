"""Inference: models that generate text, and the KV caches."""

from rooftile.engine.async_engine import AsyncEngine, EngineStats
from rooftile.engine.cache import KVCache
from rooftile.engine.config import ModelConfig
from rooftile.engine.engine import Engine
from rooftile.engine.generation import Completion, StreamChunk
from rooftile.engine.paged_cache import PagedKVCache, PagedSequence
from rooftile.engine.speculation import Draft, NGram
from rooftile.engine.streams import Stream
from rooftile.errors import QueueFull, RequestError

__all__ = [
    "AsyncEngine",
    "Completion",
    "Draft",
    "Engine",
    "EngineStats",
    "KVCache",
    "ModelConfig",
    "NGram",
    "PagedKVCache",
    "PagedSequence",
    "QueueFull",
    "RequestError",
    "Stream",
    "StreamChunk",
]
