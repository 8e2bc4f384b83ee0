"""`python -m trainmark`, which is what torchrun starts."""

import sys

from trainmark.cli import main

sys.exit(main())
