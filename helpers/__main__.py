"""``python -m helpers``: the project's command line."""

import sys

try:
    from helpers.cli import main

    status = main()
except ModuleNotFoundError as error:
    print(
        f"Error: {error.name} is not installed for this Python ({sys.executable}): use .venv/bin/python, which "
        "`make report` sets up, or install requirements.txt.",
        file=sys.stderr,
    )
    status = 1
except KeyboardInterrupt:  # before main could expect one
    print("Interrupted.", file=sys.stderr)
    status = 130
sys.exit(status)
