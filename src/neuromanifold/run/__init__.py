"""Running over data: batches, the one loop, and what must not change meanwhile."""
