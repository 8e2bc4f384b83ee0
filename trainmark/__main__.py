"""`python -m trainmark`, which is what torchrun starts."""

import os
import sys

from trainmark.cli import main

if "TORCHELASTIC_RUN_ID" in os.environ:
    from trainmark.distributed.launched import leave, run_rank

    leave(run_rank(main))
sys.exit(main())
