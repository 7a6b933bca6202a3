"""`rooftile.AutoModelForCausalLM`: models that are patched when they are loaded."""

from __future__ import annotations

import difflib
import os
from typing import Any

from rooftile.huggingface.patching import check_switches, patch
from rooftile.huggingface.planning import SWITCHES

# Below it are arguments of transformers: attention_bias=True is 0.78 like `attention`. Misspelled switches are above.
_MISSPELLED = 0.8
_PATH = "pretrained_model_name_or_path"


class AutoModelForCausalLM:
    """transformers' `AutoModelForCausalLM`, whose models are patched:

        model = rooftile.AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", dtype="bfloat16", linear=True)

    The model is an instance of transformers' own class. `rooftile.PatchHandle.of(model)` is the handle of the patch.
    """

    def __init__(self) -> None:
        raise TypeError("AutoModelForCausalLM has no instances; call from_pretrained(...) or from_config(...)")

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model, and patch it.

        Args:
            args, kwargs: those of `transformers.AutoModelForCausalLM.from_pretrained`, and among the keyword arguments
                the switches of `rooftile.patch`. The path `"demo"` is the small model in the package.

        Raises:
            FileNotFoundError: a folder is named that does not exist.
            ValueError: Rooftile does not know the model's family.
            TypeError: a switch is not a bool, or its name is misspelled. Nothing is loaded then.
            ImportError: transformers is not installed.
        """
        from rooftile.engine.hub import DEMO, folder_of

        path = args[0] if args else kwargs.get(_PATH)
        if path == DEMO:
            path = folder_of(path)
            args, kwargs = ((path, *args[1:]), kwargs) if args else (args, kwargs | {_PATH: path})
        _check_named(path)
        return _patched("from_pretrained", args, kwargs)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """A patched model with random weights, as `transformers.AutoModelForCausalLM.from_config` makes it.

        Args and errors are those of `from_pretrained`.
        """
        return _patched("from_config", args, kwargs)


def _check_named(path: Any) -> None:
    """Of a folder that does not exist, transformers says that it is no valid id."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if not isinstance(path, (str, os.PathLike)) or os.path.exists(path):
        return
    try:
        validate_repo_id(os.fspath(path))
    except HFValidationError:
        raise FileNotFoundError(
            f"AutoModelForCausalLM.from_pretrained: {path} does not exist; expected a checkpoint's folder, or the id "
            "of a model on the Hugging Face Hub (owner/name)"
        ) from None


def _patched(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    switches = {
        name: kwargs.pop(name)
        for name, value in list(kwargs.items())
        if name in SWITCHES
        or (isinstance(value, bool) and difflib.get_close_matches(name, SWITCHES, cutoff=_MISSPELLED))
    }
    check_switches(f"AutoModelForCausalLM.{method}", switches)
    model = getattr(AutoModelForCausalLM, method)(*args, **kwargs)
    patch(model, **switches)
    return model
