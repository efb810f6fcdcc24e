"""Which texts hold which pages of a cache. Plain Python that knows no model."""

from collections.abc import Iterable

SIZE = 128  # tokens of a page


def number_for(num_tokens: int, size: int) -> int:
    """Returns the pages that hold so many tokens."""
    return -(-num_tokens // size)


class Allocator:
    """Pages 1 to P, and how many texts hold each. A page without one is free. Page 0 is never given to a text.

    Args:
      number: P.
      size: tokens of a page.
    """

    def __init__(self, number: int, size: int):
        self.number, self.size = number, size
        self._free = list(range(number, 0, -1))
        self._num_holders = [0] * (number + 1)

    @property
    def num_free(self) -> int:
        """Pages that no text holds."""
        return len(self._free)

    def missing(self, pages: list[int], num_tokens: int) -> int:
        """Returns how many pages a text lacks for so many tokens."""
        return max(0, number_for(num_tokens, self.size) - len(pages))

    def take(self, number: int) -> list[int]:
        """Returns free pages, which a text holds from now on.

        Raises:
          ValueError: fewer are free.
        """
        if number > self.num_free:
            raise ValueError(f"{number} pages were asked for, and {self.num_free} are free")
        taken = [self._free.pop() for _ in range(number)]
        self.share(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Lets one more text hold pages."""
        for page in pages:
            self._num_holders[page] += 1

    def drop(self, pages: Iterable[int]) -> list[int]:
        """Lets one text less hold pages, and returns those that are free now: no text holds them."""
        freed = []
        for page in pages:
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                freed.append(page)
        self._free += freed
        return freed
