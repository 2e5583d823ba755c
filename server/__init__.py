"""What runs in the cloud: round state machine, pruning-growing, aggregation, store, services."""
