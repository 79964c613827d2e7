"""ds_config: every key is checked, and each is used, named in the log, or refused.

It may import optimizers and errors.
"""

from .config import Config as Config
from .load import load_config as load_config
