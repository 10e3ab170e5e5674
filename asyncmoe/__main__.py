"""`python -m asyncmoe` is the command `asyncmoe`."""

from asyncmoe.cli.main import main

raise SystemExit(main())
