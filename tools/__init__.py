"""What the project runs on itself beside tests and benches: wheels, and ARM boards emulated here."""
