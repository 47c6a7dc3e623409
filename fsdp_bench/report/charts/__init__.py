"""Pictures: measured trials, predicted steps, trade-offs, and the largest models per server."""
