"""Text to batches: corpus, tokenizer, shards, sampler, evaluation windows."""
