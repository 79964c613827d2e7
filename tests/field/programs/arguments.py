"""Print the arguments that this program was given."""

import json
import os
import sys

words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
print(json.dumps({"rank": int(os.environ["RANK"]), "words": words}), flush=True)
