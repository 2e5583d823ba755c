"""What the project's own targets run beside tests and benches: wheels, and ARM boards emulated on this machine."""
