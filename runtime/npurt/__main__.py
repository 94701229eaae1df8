"""`python -m npurt`."""

import sys

from npurt.cli import main

sys.exit(main())
