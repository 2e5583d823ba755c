"""A deployed model in; a verified file for an inference runtime out. `exporting.export_model` does it."""
