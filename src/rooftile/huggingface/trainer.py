"""`rooftile.PatchCallback`: `rooftile.patch` in one line of a transformers Trainer."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from rooftile.huggingface.patching import PatchHandle, check_switches, patch

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
    `rooftile.unpatch(model)` restores it. A model that is patched already is left as it is, with a warning where its
    switches are others. With
    `TrainingArguments(prediction_loss_only=True)` evaluation computes no logits either.

    Args:
        switches: those of `rooftile.patch`.

    Attributes:
        handle: the `PatchHandle`; None before the Trainer is made.

    Raises:
        TypeError: a switch is unknown, or is not a bool.
        ValueError: as `rooftile.patch`, or the Trainer has several GPUs in one process: when the Trainer is made.
    """

    def __init__(self, **switches: bool) -> None:
        check_switches("PatchCallback", switches)
        self.switches = switches
        self.handle: PatchHandle | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"PatchCallback: the Trainer has {args.n_gpu} GPUs in one process, and would copy the model by "
                "torch.nn.DataParallel, whose copies a patch does not reach; start a process for each GPU (torchrun, "
                "accelerate launch) or set CUDA_VISIBLE_DEVICES"
            )
        self._patch(model, args)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._patch(model, args)  # the Trainer's model_init makes another model for each training

    def _patch(self, model: Any, args: Any) -> None:
        self.handle = PatchHandle.of(model)
        if self.handle is None:
            self.handle = patch(model, **self.switches)
            _logger.info("%s", self.handle)
        elif ignored := [s for s, on in self.switches.items() if self.handle.switches[s] != on]:
            has = ", ".join(f"{s}={self.handle.switches[s]}" for s in ignored)
            warnings.warn(f"PatchCallback: the model is patched already, with {has}; undo() it first", stacklevel=2)
        if args.prediction_loss_only:
            self.handle.skip_logits = True
