"""``python -m flashdwc``: the same as the ``flashdwc`` command."""

import sys

from .cli import main

sys.exit(main())
