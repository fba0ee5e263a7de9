"""Draws what a transaction did, as SVG that needs nothing installed."""

from longstraw.plot.transaction import transaction_svg

__all__ = ["transaction_svg"]
