"""`python -m hyla`, the same as the command `hyla`."""

import sys

from hyla.cli import main

sys.exit(main())
