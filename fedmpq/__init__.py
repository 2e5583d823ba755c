"""One model trained across boards too small for it, and shipped to each in the bits it can run."""
