"""From KV pages to a paused session: chunks first, the manifest last."""
