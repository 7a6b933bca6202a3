"""`rooftile chat`: a conversation in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from rooftile.errors import counted
from rooftile.serve.chat import ChatTemplate

HELP = "/reset forgets the conversation, /quit leaves; Ctrl-C ends an answer"


def template_of(folder: Path, file: Path | None) -> ChatTemplate:
    """The chat template, which a conversation needs.

    Raises:
        ValueError: there is none, or it is not valid.
        OSError: the file can't be read.
    """
    template = ChatTemplate.load(folder, file)
    if template is None:
        raise ValueError(f"{folder} has no chat template: give one with --chat-template, or use `rooftile generate`")
    return template


def is_utf8(text: str) -> bool:
    """Whether the bytes of a text that was read with `surrogateescape` are UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def talk(
    engine: Any,
    template: ChatTemplate,
    read: Callable[[], str],
    out: Console,
    notices: Console,
    *,
    message_of: Callable[[Exception], str] = str,
    system: str | None = None,
    max_new_tokens: int | None = None,
    **sampling: Any,
) -> None:
    """Read lines and answer them, until there are no more.

    Args:
        engine: an `AsyncEngine`. With a prefix cache the history is not computed again.
        read: returns the next line; raises EOFError at the end.
        out, notices: for answers, and for the rest.
        message_of: the text of an error of the engine.
        system: the message before all others.
        max_new_tokens: the most for an answer; by default as many as there is room for.
        sampling: options of `add`.
    """
    model = engine.engine
    begin = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = [*begin]
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line == "/reset":
            messages = [*begin]
            notices.print("The conversation begins anew.", style="dim")
        elif line.startswith("/"):
            notices.print(HELP, style="dim", markup=False)
        elif not is_utf8(line):
            notices.print("the line is not UTF-8", style="red")
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                prompt = model.tokenizer.encode(template.render(asked), add_special_tokens=False).ids
                limit = min(max_new_tokens or model.max_seq_len, model.max_seq_len - len(prompt))
                if limit < 1:
                    raise ValueError(
                        f"the conversation has {counted(len(prompt), 'token')}, and max_seq_len is "
                        f"{model.max_seq_len}: /reset"
                    )
                started = time.perf_counter()
                stream = engine.add(prompt, max_new_tokens=limit, **sampling)
            except ValueError as error:
                notices.print(message_of(error), style="red", markup=False)
                continue
            answer = _print(stream, started, out, notices)
            messages = [*asked, {"role": "assistant", "content": answer}]


def _print(stream: Any, started: float, out: Console, notices: Console) -> str:
    """The answer, written as it comes, and then how fast it came."""
    text, tokens, first = "", 0, 0.0
    try:
        for chunk in stream:
            if chunk.token >= 0:
                first = first or time.perf_counter()
                tokens += 1
            text += chunk.text or ""
            out.print(chunk.text or "", end="", markup=False, highlight=False, soft_wrap=True)
            out.file.flush()
    except KeyboardInterrupt:
        stream.abort()
    out.print()
    took = time.perf_counter() - first
    speed = f", {(tokens - 1) / took:.1f} tokens/s" if tokens > 1 and took > 0 else ""
    if tokens:
        said = f"{counted(tokens, 'token')}, the first after {first - started:.2f} s{speed}"
        notices.print(said, style="dim", highlight=False)
    return text
