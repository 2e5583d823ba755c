"""What runs in the cloud: the loop over runs and rounds, the store, the services for boards and operators."""
