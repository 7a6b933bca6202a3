"""Pages that outlive their sequences, found again by what they hold: the prefix cache.

A full page has a name: a hash of its tokens and of the name of the page before it, so of all tokens up to its end. In
one model these decide its keys and values. A page that no sequence uses keeps its name until the page is needed.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from rooftile.engine.paged_cache import PagedKVCache, PagedSequence


def page_names(tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """The names of the full pages of a sequence of those tokens; `known` are the first of them."""
    names = list(known)
    for at in range(len(names) * page_size, len(tokens) - page_size + 1, page_size):
        digest = hashlib.blake2b(names[-1] if names else b"", digest_size=16)
        digest.update(array.array("i", tokens[at : at + page_size]).tobytes())
        names.append(digest.digest())
    return names


class PrefixCache(PagedKVCache):
    """A `PagedKVCache` whose full pages can be named, and shared with later sequences.

    A named page that no sequence uses counts as free. Such pages are taken last, the one that was used least recently
    first. As long as no page is named, this is a `PagedKVCache`.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._name_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # named pages, by the time of their last use

    @property
    def free_pages(self) -> int:
        return len(self._free) + len(self._unused)

    def name(self, sequence: PagedSequence, names: Sequence[bytes]) -> None:
        """Name the first pages of a sequence, whose tokens are in the cache.

        A page keeps the name that it has. A name that another page has is not given a second time.
        """
        for page, name in zip(sequence.pages, names, strict=False):
            if page not in self._name_of and name not in self._page_of:
                self._name_of[page], self._page_of[name] = name, page

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The pages of those names, up to the first that is not there."""
        pages = []
        for name in names:
            if (page := self._page_of.get(name)) is None:
                break
            pages.append(page)
        return pages

    def unused(self, pages: Sequence[int]) -> int:
        """How many of those pages are free."""
        return sum(page in self._unused for page in pages)

    def share(self, pages: Sequence[int]) -> PagedSequence:
        """A new sequence of the tokens of those pages, which are full.

        Raises:
            ValueError: there are `max_sequences` already.
        """
        new = PagedSequence(self._empty_slot("share"), len(pages) * self.page_size, list(pages))
        for page in pages:
            self._users[page] += 1
            self._unused.pop(page, None)
        return self._place(new)

    def forget(self) -> None:
        """Take the names of all pages."""
        self._free += self._unused
        self._name_of.clear()
        self._page_of.clear()
        self._unused.clear()

    def _take(self) -> int:
        if not self._free:
            page, _ = self._unused.popitem(last=False)
            del self._page_of[self._name_of.pop(page)]
            self._free.append(page)
        return super()._take()

    def _release(self, page: int) -> None:
        if self._users[page] == 1 and page in self._name_of:
            self._users[page] = 0
            self._unused[page] = None
        else:
            super()._release(page)
