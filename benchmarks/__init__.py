"""Figures of speed and memory, each measured side by side with what it is compared to. Results: RESULTS.md."""
