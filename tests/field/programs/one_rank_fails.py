"""End rank 1 with an error of its own while rank 0 waits for it."""

import json
import os
import sys
import time

rank = int(os.environ["RANK"])
print(json.dumps({"rank": rank}), flush=True)
if rank == 1:
    sys.exit(7)
time.sleep(600)
