"""The transaction: capture, score, replay, sweep and finalize, for any model that an adapter presents."""
