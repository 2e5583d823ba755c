"""The machine underneath: files that survive crashes, private folders, logs. Knows nothing of models."""
