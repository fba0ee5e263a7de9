"""Which rows a window holds, and which of them stay when rows are added."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Slide:
    """A window of W tokens, the query's own included, in front of `own` new rows.

    Attributes:
        window: W, at least 2; what is kept between passes is the last W - 1 rows.
        prefix: tokens before the new rows.
        own: new rows.
    """

    window: int
    prefix: int
    own: int

    @property
    def before(self) -> int:
        """Rows kept before the new ones."""
        return min(self.prefix, self.window - 1)

    @property
    def after(self) -> int:
        """Rows kept after them."""
        return min(self.before + self.own, self.window - 1)

    @property
    def entering(self) -> int:
        """New rows, the last ones, that are kept."""
        return min(self.own, self.window - 1)

    @property
    def staying(self) -> int:
        """Rows kept before, the last ones, that stay: none unless the new rows are fewer than the window."""
        return self.after - self.entering
