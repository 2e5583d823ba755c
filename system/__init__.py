"""The machine underneath: durable files, private folders, addresses, cores, logs. Knows nothing of models."""
