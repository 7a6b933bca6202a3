"""`rooftile.PatchCallback`: `rooftile.patch` in one line of a transformers Trainer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rooftile.huggingface.patching import PatchHandle, patch

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    try:
        from transformers import TrainerCallback
    except ImportError:  # `rooftile.PatchCallback` is a name all the same; no Trainer will ask for it
        TrainerCallback = object

_logger = logging.getLogger(__name__)


class PatchCallback(TrainerCallback):
    """Patches the model of a Trainer:

        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[rooftile.PatchCallback()])

    The model is patched when the Trainer is made, before accelerate wraps it, and stays patched: `handle.undo()` or
    `rooftile.unpatch(model)` restores it. A model that is patched already is left as it is.

    Args:
        switches: those of `rooftile.patch`.

    Attributes:
        handle: the `PatchHandle`; None before the Trainer is made.

    Raises:
        TypeError: a switch is unknown, or is not a bool: when the Trainer is made.
        ValueError: as `rooftile.patch`: when the Trainer is made.
    """

    def __init__(self, **switches: bool) -> None:
        self.switches = switches
        self.handle: PatchHandle | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._patch(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._patch(model)  # the Trainer's model_init makes another model for each training

    def _patch(self, model: Any) -> None:
        self.handle = PatchHandle.of(model)
        if self.handle is None:
            self.handle = patch(model, **self.switches)
            _logger.info("%s", self.handle)
