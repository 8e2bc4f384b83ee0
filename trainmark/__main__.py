"""`python -m trainmark`, which is what torchrun, or whoever starts ranks without it, starts."""

import os
import sys

from trainmark.cli import main

if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
    from trainmark.distributed.launched import leave, run_rank

    leave(run_rank(main))
sys.exit(main())
