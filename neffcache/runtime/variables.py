"""Names of the variables that `run` hands to the training processes; all of them are set before Python starts."""

MANIFEST = "NEFFCACHE_MANIFEST"
"""Path of the view's manifest.json. Without it nothing of neffcache happens in a training process."""

REPORTS = "NEFFCACHE_REPORTS"
"""Directory for one report per rank."""

ON_MISS = "NEFFCACHE_ON_MISS"
"""fail, compile or warn."""

HARNESS = "NEFFCACHE_HOST_HARNESS"
"""1: make the CPU TorchTitan's device (host toolchain)."""

RANK_PROCESS = "NEFFCACHE_RANK_PROCESS"
"""Process id of the rank; its children (data loaders, compile workers) see it and stay untouched."""
