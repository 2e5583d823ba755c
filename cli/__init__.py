"""The `fedmpq` command: finds a sub-command's package and hands over."""
