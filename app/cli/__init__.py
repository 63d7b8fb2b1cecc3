"""The `dte` command.

Invariant: whatever goes wrong on purpose ends as one message on stderr and an exit code, never as a traceback: 2 for
input that can never work, 1 for everything else that failed.
"""

from __future__ import annotations

import sys

from engine.errors import DteError, InvalidInput

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point of the console script."""
    from app.cli.root import app

    try:
        app()
    except DteError as error:
        print(f"dte: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"     {error.remedy}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, InvalidInput) else EXIT_FAILED)
    except KeyboardInterrupt:
        print("dte: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`dte versions | head`): nothing is left to say to it.
        sys.stderr.close()
        sys.exit(EXIT_FAILED)
