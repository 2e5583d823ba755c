"""The local round: engines that train codes, and the calibration pass. Knows no network."""
