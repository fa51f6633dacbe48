"""``python -m helpers``: the project's command line."""

import sys

from helpers.cli import main

sys.exit(main())
