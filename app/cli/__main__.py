"""`python -m app.cli` is `dte`."""

from app.cli import main

main()
