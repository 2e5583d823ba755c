"""`python -m fedmpq.cli`: the `fedmpq` command for a program that knows its interpreter only."""

from fedmpq.cli.main import main

raise SystemExit(main())
