"""Identity of this package, by DeepSpeed's names."""

from __future__ import annotations

from . import VERSION

__version__ = version = VERSION
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
git_hash = __git_hash__ = "none"
git_branch = __git_branch__ = "dslaunch"
