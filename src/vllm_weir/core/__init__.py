"""What runs in the engine core: cache keys, step budgets and the waiting queue."""
