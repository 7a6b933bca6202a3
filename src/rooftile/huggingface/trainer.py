"""`rooftile.PatchCallback`: `rooftile.patch` in one line of a transformers Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader

from rooftile.huggingface.loss_head import IGNORED
from rooftile.huggingface.patching import PatchHandle, check_switches, patch

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    try:
        from transformers import TrainerCallback
    except ImportError:  # `rooftile.PatchCallback` is a name all the same; no Trainer will ask for it
        TrainerCallback = object

_logger = logging.getLogger(__name__)
# Leaving out tokens gathers the hidden states of the others: 12 bytes an element, in bfloat16 with the gradient. The
# head's three GEMMs are 6 * vocabulary operations an element, at 3.3 TB/s and 800 TFLOP/s 65 times as long for 32000.
_LEAST_IGNORED = 1 / 32


class CountingCollator:
    """A data collator whose batches have `valid_rows`, the count of their labels, for `linear_cross_entropy`.

    It counts where the labels are made, in memory of the host, and so never waits for a device. A batch in which nearly
    every label counts is left as it is, and so is one that has no labels, or has a count already.

    Args:
        collate: the collator that makes the batch.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, features: Any) -> Any:
        batch = self.collate(features)
        if not isinstance(batch, MutableMapping) or "valid_rows" in batch:
            return batch
        labels = batch.get("shift_labels", batch.get("labels"))
        if isinstance(labels, Tensor) and labels.device.type == "cpu":
            # The first label of a row is counted too, although the shift drops it: where PEFT puts virtual tokens
            # before it, it is a target. More than there are is no fault.
            valid = int((labels != IGNORED).sum())
            if valid <= (1 - _LEAST_IGNORED) * labels.numel():
                batch["valid_rows"] = valid
        return batch


class PatchCallback(TrainerCallback):
    """Patches the model of a Trainer:

        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[rooftile.PatchCallback()])

    The model is patched when the Trainer is made, before accelerate wraps it, and stays patched: `handle.undo()` or
    `rooftile.unpatch(model)` restores it. A model that is patched already is left as it is, with a warning where its
    switches are others. With
    `TrainingArguments(prediction_loss_only=True)` evaluation computes no logits either.

    In training the batches' labels are counted on the host, so that a causal model's fused head multiplies only the
    tokens whose label counts: not in graphs of `torch.compile`, nor where accelerate dispatches one process's batches
    to all, as it does with iterable datasets unless told otherwise.

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
        if self.handle is not None and self.handle.takes_valid_rows:
            _count_labels(kwargs.get("train_dataloader"))

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


def _count_labels(loader: Any) -> None:
    """Let the batches of a Trainer's loader have `valid_rows`."""
    if type(loader).__name__ == "DataLoaderDispatcher":  # accelerate's, which concatenates batches: of tensors alone
        return
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's wrapper reads its attributes from there
    if isinstance(loader, DataLoader) and not isinstance(loader.collate_fn, CountingCollator):
        loader.collate_fn = CountingCollator(loader.collate_fn)
