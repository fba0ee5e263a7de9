"""transformers causal LMs, PEFT adapters included, through the library's own hooks."""
