"""KV blocks as values: identity, pool, radix tree, layout, digests. No tensor, no IO."""
