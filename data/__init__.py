"""What is trained on: data sets, where they are read from, and how they are cut."""
